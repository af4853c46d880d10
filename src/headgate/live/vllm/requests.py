"""What a request says of itself: its class, what it was promised, how long its output may become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

from headgate.core.errors import unknown
from headgate.core.request import Slo
from headgate.live.vllm.fields import LOG, Promise, Settings
from headgate.workloads.durations import duration

LONGEST_KIND = 64  # letters of a request's class; what comes over HTTP is not to fill memory


class Said(NamedTuple):
    """What a request says of itself."""

    kind: str = ""
    slo: Slo = Slo()
    guess: int | None = None


WORDS = ("headgate_class", "headgate_ttft", "headgate_tbt", "headgate_guess")
BAD: Counter[str] = Counter()  # words of requests that were ignored in this process, by name
NOTHING = Said()


def promises(extra_args: Mapping[str, Any] | None, settings: Settings) -> Said:
    """Class, promises and predicted output of a request.

    A wrong value is ignored and counted, and told the first time: no request is refused for it.
    """
    default = Said(slo=Slo(settings.ttft, settings.tbt)) if settings.ttft or settings.tbt else NOTHING
    if not extra_args:
        return default
    given = {word: extra_args[word] for word in extra_args if str(word).startswith("headgate_")}
    if not given:
        return default
    for word in given:
        if word not in WORDS:
            _complain(word, unknown("word of a request", word, WORDS))
    kind = _read(given, "headgate_class", lambda value: _kind(value, settings))
    promised = settings.classes.get(kind or "", Promise())
    first = _read(given, "headgate_ttft", _seconds)
    between = _read(given, "headgate_tbt", _seconds)
    return Said(
        kind or "",
        Slo(first or promised.ttft or settings.ttft, between or promised.tbt or settings.tbt),
        _read(given, "headgate_guess", _tokens),
    )


def _read(given: Mapping[str, Any], word: str, read: Callable[[Any], Any]) -> Any:
    """The value of a word, or None where there is none or a wrong one."""
    if word not in given:
        return None
    try:
        return read(given[word])
    except (ValueError, TypeError, OverflowError) as error:
        _complain(word, error)
        return None


def _complain(word: str, error: Exception) -> None:
    word = word if word in WORDS else "others"
    BAD[word] += 1
    if BAD[word] == 1:
        LOG.warning("headgate: %s of a request ignored, as all such later ones: %s", word, error)


def _kind(value: object, settings: Settings) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_KIND:
        raise ValueError(f"{str(value)[:LONGEST_KIND]!r} is not a class; give 1 to {LONGEST_KIND} letters")
    if settings.classes and value not in settings.classes:
        raise unknown("class", value, settings.classes)
    return value


def _seconds(value: object) -> float:
    seconds = duration(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < inf:
        raise ValueError(f"{str(value)[:20]!r} is not a time above 0; write seconds, or 500ms")
    return float(seconds)


def _tokens(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not float(value).is_integer():
        raise ValueError(f"{str(value)[:20]!r} is not a number of tokens")
    if int(float(value)) < 1:
        raise ValueError(f"{value!r} is below 1 token")
    return int(float(value))
