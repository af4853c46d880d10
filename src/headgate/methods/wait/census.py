"""A census of the traffic: how many of each type come, how long their prompts are, how long they decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from headgate.core.policy import End
from headgate.estimators.averages import Window
from headgate.estimators.hazard import OutputHazard
from headgate.methods.wait.traffic import Seen

ENOUGH = 20  # completions of a type before its own lengths count; until then those of all types do


class _Lengths:
    """How long requests decode: those that do, and the share that does."""

    def __init__(self, window: int) -> None:
        self.hazard = OutputHazard(window)
        self.decoding = Window(window)


class Census:
    """The last `window` arrivals of all types, and as many completions of each."""

    def __init__(self, window: int) -> None:
        self.ended = 0  # completions so far
        self._window = window
        self._arrivals: deque[tuple[str, int, int, float]] = deque(maxlen=window)
        self._all = _Lengths(window)
        self._lengths: dict[str, _Lengths] = {}

    def came(self, name: str, prompt: int, when: float, cached: int = 0) -> None:
        """One request of that type has come; the prefix cache had so many tokens of it."""
        self._arrivals.append((name, prompt, cached, when))

    def went(self, name: str, decodes: int, how: End) -> None:
        """One has left after so many decode iterations; a request that never began (-1) is ignored."""
        whole = how in (End.STOPPED, End.LIMIT)
        if decodes < 0 or (not decodes and not whole):
            return
        self.ended += whole
        own = self._lengths.setdefault(name, _Lengths(self._window))
        for each in (own, self._all):
            each.decoding.update(float(decodes > 0))
            if decodes:
                each.hazard.update(decodes, whole)

    def seen(self, running: Mapping[str, Sequence[int]], now: float, longer: float = 0.0) -> dict[str, Seen]:
        """The types of the last arrivals; `running`: ages of those that decode; prompts are `longer`."""
        span = now - self._arrivals[0][-1] if self._arrivals else 0.0
        if span <= 0:
            return {}
        prompts: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        for name, prompt, there, _ in self._arrivals:
            prompts.setdefault(name, []).append(prompt)
            cached[name] = cached.get(name, 0) + there
        everybody = [age for ages in running.values() for age in ages if age]
        found: dict[str, Seen] = {}
        for name, theirs in prompts.items():
            own = self._lengths.get(name, self._all)
            known = own if len(own.hazard) >= ENOUGH else self._all
            decoding = own if len(own.decoding) >= ENOUGH else self._all  # known of types that never decode
            ages = everybody if known is self._all else [age for age in running.get(name, ()) if age]
            survival, share = known.hazard.survival(ages), decoding.decoding.value
            if survival is not None and share is not None:
                count = len(theirs)
                mean, found_there = sum(theirs) / count + longer, cached[name] / count
                found[name] = Seen(count / span, mean, survival, share, found_there)
        return found
