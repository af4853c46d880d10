"""Which class a request belongs to. The number of classes is bounded by the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.live.route.config import Class, GateConfig, Match
from headgate.live.route.keys import Key

Traits = tuple[Key | None, str | None, str, str | None, int]


class Classes:
    """The rules of a configuration, in its order; requests that fit none belong to the default.

    A rule by key comes before one by header, header before model, model before body field, field before
    prompt length; within these the order of the file counts. What the client itself says, header and field,
    counts only for keys that may choose, or where no keys are in use.
    """

    def __init__(self, config: GateConfig, keyed: bool = False) -> None:
        self.default = config.default.name
        self._keyed = keyed
        self._rules = sorted(config.classes, key=lambda each: _rank(each.match))
        self._rules = [each for each in self._rules if _rank(each.match) < len(RANKS)]
        self.by_name: dict[str, Class] = {each.name: each for each in (*config.classes, config.default)}

    @property
    def names(self) -> Sequence[str]:
        """All classes, the default last."""
        return tuple(self.by_name)

    def of(self, key: Key | None, header: str | None, model: str, field: str | None, prompt: int) -> Class:
        """The class of a request with these traits."""
        if self._keyed and not (key is not None and key.choose):
            header = field = None
        traits: Traits = key, header, model, field, prompt
        for rule in self._rules:
            if _fits(rule.match, traits):
                return rule
        return self.by_name[self.default]


RANKS = ("key", "header", "model", "field", "prompt")


def _rank(match: Match) -> int:
    """The first kind of rule in it."""
    given = (bool(match.key), match.header is not None, bool(match.model), match.field is not None)
    ranks = [rank for rank, there in enumerate((*given, match.prompt is not None)) if there]
    return min(ranks, default=len(RANKS))


def _fits(match: Match, traits: Traits) -> bool:
    key, header, model, field, prompt = traits
    if match.key and (key is None or key.name not in _listed(match.key)):
        return False
    if match.header is not None and match.header != header:
        return False
    if match.model and model not in _listed(match.model):
        return False
    if match.field is not None and match.field != field:
        return False
    return match.prompt is None or match.prompt[0] <= prompt < match.prompt[1]


def _listed(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
