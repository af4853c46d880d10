"""Settings inside vLLM: from a file or `--additional-config`, read again on change, made into a policy."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy
from headgate.cost.card import Card, load_card
from headgate.cost.likeness import Likeness, doubts, refusals
from headgate.cost.model import StepCost
from headgate.drivers.engine import Engine
from headgate.spec.build import make_policy, policy_class
from headgate.spec.words import Words, checked, read_words, underscored
from headgate.vllm.requests import promises
from headgate.vllm.words import LOG, OBSERVE, Floor, Promise, Settings

__all__ = ["Reload", "Settings", "build_policy", "check_policy", "promises", "read_settings"]

FILE = "HEADGATE_CONFIG"  # the environment variable that names a file of settings
KEY = "headgate"  # our key in vLLM's --additional-config
LOOK_EVERY = 1.0  # seconds between two looks at the file
CAN_BE_ANYTHING = {"kv_tokens": 1 << 24, "block": 16, "max_model_len": 1 << 20}
UNKNOWN = Likeness()
MOST_TOKENS, MOST_REQUESTS = 1 << 20, 1 << 16  # where the engine's limits are not known yet


def file_of() -> str | None:
    """The file of settings, where the environment names one."""
    return os.environ.get(FILE) or None


def read_settings(additional_config: object = None, file: str | None = None) -> Settings:
    """What `--additional-config` says, over what the file says, over the defaults.

    A policy brings its own parameters: where the upper one names a policy, the lower one's `set` is dropped.
    """
    file = file or file_of()
    words = check_words(read_file(file), f"settings file {file}: ") if file else {}
    return merge(words, additional_config)


def merge(words: dict[str, Any], additional_config: object) -> Settings:
    """Checked words, and what `--additional-config` says over them."""
    merged = dict(words)
    own = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if own is not None:
        if not isinstance(own, dict):
            raise InputError(f'--additional-config: {KEY} must be a table, such as {{"policy": "mixed"}}')
        upper = check_words(own, f"--additional-config, {KEY}: ")
        if "policy" in upper:
            merged.pop("set", None)
        merged |= upper
    return checked(Settings, merged, _fields)


def check_words(words: dict[str, Any], where: str) -> dict[str, Any]:
    """The same words with underscores, or one line that says which is wrong and where it stands."""
    words = underscored(words, where)
    checked(Settings, words, _fields, where)
    return words


def read_file(path: str) -> dict[str, Any]:
    """The words in a JSON file, told by its name or first letter, or in a TOML file; not yet checked."""
    what = "settings file"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"{what} {path}: {reason}; give a readable JSON or TOML file") from None
    if not (path.endswith(".json") or text.lstrip().startswith("{")):
        return read_words(path, what)
    try:
        words = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{what} {path}, {place}: not valid JSON ({error.msg}); mend the file") from None
    except (RecursionError, ValueError) as error:  # nested without end, a number of thousands of digits
        raise InputError(f"{what} {path}: cannot be read: {str(error)[:60]}; mend the file") from None
    if not isinstance(words, dict):
        raise InputError(f'{what} {path}: must be a table, such as {{"policy": "mixed"}}; mend the file')
    return words


def _fields(parent: tuple[int | str, ...]) -> list[str]:
    """The words one may use at this place."""
    tables: dict[str, type[Words]] = {"classes": Promise, "floor": Floor}
    here = tables.get(str(parent[0]), Settings) if parent else Settings
    return list(here.model_fields)


class Reload:
    """Notices that the file of settings has changed. Asked at every step; looks at most once a second.

    A file counts as changed when two looks in a row saw it the same: an editor may be in the middle of it.
    A file that went wrong is told once, and the settings in force stay.
    """

    def __init__(
        self, path: str, additional_config: object = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self._over = additional_config
        self._clock = clock
        self._used = self._before = self._stamp()
        self._next = clock() + LOOK_EVERY

    def changed(self) -> Settings | None:
        """The new settings, once, or None."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + LOOK_EVERY
        before, self._before = self._before, self._stamp()
        if self._before == self._used or self._before != before:
            return None
        self._used = before
        try:
            return read_settings(self._over, self.path)
        except InputError as error:
            LOG.warning("headgate: %s; the settings in force stay", error)
            return None

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


# -- the policy ---------------------------------------------------------------------------------------


def build_policy(
    settings: Settings,
    *,
    kv_tokens: int,
    block: int,
    max_model_len: int,
    batch_tokens: int,
    running: int,
    like: Likeness = UNKNOWN,
) -> tuple[BatchPolicy, dict[str, Any]]:
    """The policy for an engine of these limits, and its parameters; `like` says what engine it is."""
    card = load_card(settings.card) if settings.card else None
    if card is not None:
        wrong = refusals(card, like)
        if wrong and not settings.any_card:
            raise InputError(wrong[0])
        for warning in (*wrong, *doubts(card, like), *beyond(card, batch_tokens, running, max_model_len)):
            LOG.warning("headgate: %s", warning)
    return _make(settings, card, Engine(_cost(card), kv_tokens, max_model_len, batch_tokens, running, block))


def check_policy(settings: Settings, batch_tokens: int | None = None, running: int | None = None) -> None:
    """Refuse what `build_policy` would refuse, as far as that can be told before the engine is there."""
    card = load_card(settings.card) if settings.card else None
    if settings.policy == OBSERVE:
        return
    tokens = batch_tokens or max(MOST_TOKENS, running or 0)
    seats = min(running or MOST_REQUESTS, tokens)
    _make(settings, card, Engine(_cost(card), batch_tokens=tokens, running=seats, **CAN_BE_ANYTHING))


def beyond(card: Card, batch_tokens: int, running: int, max_model_len: int) -> list[str]:
    """Where the engine may go further than the card was made for: there its prices are extrapolated."""
    pairs = {
        "max_num_batched_tokens": (batch_tokens, card.max_batch_tokens),
        "max_num_seqs": (running, card.max_running),
        "max_model_len": (max_model_len, card.max_model_len),
    }
    return [
        f"{name} is {ours}, card {card.name} was made for up to {theirs}; its prices are extrapolated beyond"
        for name, (ours, theirs) in pairs.items()
        if ours > theirs
    ]


def _make(settings: Settings, card: Card | None, engine: Engine) -> tuple[BatchPolicy, dict[str, Any]]:
    name, words = settings.named()
    cost = inspect.signature(policy_class(name)).parameters.get("cost")
    if card is None and cost is not None and cost.default is cost.empty:
        raise InputError(
            f"policy {name} needs to know what steps cost; name a card, such as --card h200-qwen3-8b "
            "(in a file: card), or choose a policy that needs none, such as mixed or eb"
        )
    limits = {
        "slots": ("max-num-seqs", engine.running),
        "budget": ("max-num-batched-tokens", engine.batch_tokens),
    }
    for word, (flag, most) in limits.items():
        if str(words.get(word, "")).isdigit() and int(words[word]) > most:
            raise InputError(
                f"policy {name}: {word}={words[word]} exceeds the engine's {most}; lower it or raise --{flag}"
            )
    try:
        return make_policy(name, words, engine)
    except InputError:
        raise
    except Exception as error:  # from the user's own policy
        said = " ".join(str(error).split())
        raise InputError(f"policy {name} cannot be made: {type(error).__name__}: {said}; mend it") from error


def _cost(card: Card | None) -> StepCost:
    """The card's prices; without a card none, which only policies that can do without are given."""
    return cast(StepCost, card.cost if card else None)
