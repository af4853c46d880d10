"""Settings inside vLLM: from a file or `--additional-config`, read again on change, made into a policy."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from typing import Any, cast

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy
from headgate.cost.card import DERIVED_CARD, Card, load_card, parse_card
from headgate.cost.likeness import Likeness, doubts, refusals
from headgate.cost.model import StepCost
from headgate.live.files import MOST_CARD_BYTES, read_regular
from headgate.live.vllm.fields import LOG, OBSERVE, Floor, Promise, Settings
from headgate.live.vllm.requests import promises
from headgate.methods.keep.confined import confined
from headgate.methods.make import make_policy, policy_class, policy_parameters
from headgate.settings_base import SettingsModel, checked, parse_toml, underscored
from headgate.sim.engine.engine import Engine

__all__ = ["Settings", "build_policy", "check_policy", "promises", "read_settings"]

FILE = "HEADGATE_CONFIG"  # the environment variable that names a file of settings
KEY = "headgate"  # our key in vLLM's --additional-config
CAN_BE_ANYTHING: dict[str, Any] = {"kv_tokens": 1 << 24, "block": 16, "max_model_len": 1 << 20}
TPOT = "tpot is taken for tbt, every gap between two tokens; it will be the mean of a request: write tbt"
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
    checked(Settings, words, _fields, where, written=True)
    tables = (words, words.get("floor", {}), *words.get("classes", {}).values())
    if any("tpot" in table for table in tables):
        LOG.warning("headgate: %s%s", where, TPOT)
    return Settings.renamed(words)


def read_file(path: str) -> dict[str, Any]:
    """The words in a JSON file, told by its name or first letter, or in a TOML file; not yet checked."""
    what = "settings file"
    try:
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"{what} {path}: {reason}; give a readable JSON or TOML file") from None
    if not (path.endswith(".json") or text.lstrip().startswith("{")):
        return parse_toml(text, path, what)
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
    tables: dict[str, type[SettingsModel]] = {"classes": Promise, "floor": Floor}
    here = tables.get(str(parent[0]), Settings) if parent else Settings
    return list(here.model_fields)


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
    graph: int | None = None,
) -> tuple[BatchPolicy, dict[str, Any]]:
    """The policy for an engine of these limits, and its parameters; `like` says what engine it is.

    `graph`, where it is known, is the engine's largest CUDA graph: the card's may be another.
    """
    card = load_named(settings.card)
    if card is not None:
        wrong = refusals(card, like)
        if wrong and not settings.any_card:
            raise InputError(wrong[0])
        for warning in (*wrong, *doubts(card, like), *beyond(card, batch_tokens, running, max_model_len)):
            LOG.warning("headgate: %s", warning)
    cost = _cost(card)
    if card is not None and graph:
        cost = cost.graphed(graph)
        if settings.named()[0] == "keep" and (said := confined(cost, settings.tightest())):
            LOG.warning("headgate: %s", said)
    return _make(settings, card, Engine(cost, kv_tokens, max_model_len, batch_tokens, running, block))


def check_policy(settings: Settings, batch_tokens: int | None = None, running: int | None = None) -> None:
    """Refuse what `build_policy` would refuse, as far as that can be told before the engine is there."""
    card = load_named(settings.card)
    _check_refusals(settings)
    if settings.policy == OBSERVE:
        return
    tokens = batch_tokens or max(MOST_TOKENS, running or 0)
    seats = min(running or MOST_REQUESTS, tokens)
    _make(settings, card, Engine(_cost(card), batch_tokens=tokens, running=seats, **CAN_BE_ANYTHING))


def _check_refusals(settings: Settings) -> None:
    """Only a policy that can refuse makes --refuse mean anything."""
    name = settings.named()[0]
    own = name.endswith(".py") or ".py:" in name  # it may set Plan.reject
    if settings.refuse and not own and (name == OBSERVE or "refuse" not in policy_parameters(name)):
        raise InputError(
            f"--refuse {settings.refuse}, but policy {name} refuses nothing; choose --policy keep or drop it"
        )


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
            f"policy {name} needs to know what steps cost; name a card, such as --card cal-h200-qwen3-8b "
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


def load_named(name: str | None) -> Card | None:
    """A built-in card, or one from a regular file of bounded size."""
    if not name:
        return None
    if name.startswith(DERIVED_CARD) or not (name.endswith(".json") or "/" in name):
        return load_card(name)
    try:
        text = read_regular(name, MOST_CARD_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(
            f"card file {name}: {reason}; give a readable file or one of the built-in names"
        ) from None
    return parse_card(text, name)


def _cost(card: Card | None) -> StepCost:
    """The card's prices; without a card none, which only policies that can do without are given."""
    return cast(StepCost, card.cost if card else None)
