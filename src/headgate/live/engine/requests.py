"""Per-request parameters: class and tenant of a request, what it was promised, its predicted output.

Whatever a client sends is hostile until it is bounded. The work for one request is bounded too: five look-ups
by name, texts of at most `LONGEST_TEXT` characters, and at most `LOOKED_AT` names of other parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from headgate.core.durations import duration
from headgate.core.errors import InputError
from headgate.core.request import MOST_TENANTS, NO_SLO, OTHER_TENANTS, Slo
from headgate.live.engine.process import LOG
from headgate.live.engine.settings import CLIENTS_MAY, NO_PROMISE, WARM_UP, Settings

LONGEST_TEXT = 64  # characters of a value
LOOKED_AT = 16  # parameters of one request whose names are checked for spelling
MOST_CLASSES = 64  # classes that clients may make up where the settings declare none
LONGEST_TIME = 86_400.0  # seconds; a longer promise says nothing
MOST_TOKENS = 1 << 24  # of a guess; the driver cuts it to the request's own limit
SHOWN = 32  # characters of a wrong value in the log


class RequestTerms(NamedTuple):
    kind: str = ""
    slo: Slo = Slo()
    guess: int | None = None
    tenant: str = ""


Reader = Callable[[Any, Settings], Any]
PREFIX = "headgate_"
WORDS = tuple(PREFIX + name for name in CLIENTS_MAY)
CLASS, TTFT, TBT, GUESS, TENANT = WORDS
IGNORED: Counter[str] = Counter()  # parameters that were ignored in this process, by name
MADE_UP: set[str] = set()  # classes of this process that no setting declares
TENANTS: set[str] = set()  # of this process, `MOST_TENANTS` at most
NOTHING = RequestTerms()
WARMING = RequestTerms(WARM_UP, Slo(background=True))


def promises(extra_args: Mapping[str, Any] | None, settings: Settings) -> RequestTerms:
    """Each within its range. A wrong or forbidden parameter is ignored and counted, and logged the first
    time. A weight comes from the class, or where the engine orders requests by priority from that.
    """
    default = RequestTerms(slo=settings.common) if settings.common != NO_SLO else NOTHING
    if not extra_args:
        return default
    known = sum(word in extra_args for word in WORDS)
    for word in islice(extra_args, LOOKED_AT) if len(extra_args) > known else ():
        if isinstance(word, str) and word.startswith(PREFIX) and word not in WORDS:
            _complain("others", f"unknown parameter {_clipped(word)}; known: {', '.join(WORDS)}")
    if not known:
        return default
    apart: Reader = lambda value, all: told_apart(_name(value, "tenant"), TENANTS)  # noqa: E731
    tenant = _read(extra_args, TENANT, settings, apart) or ""
    if extra_args.get(CLASS) == WARM_UP:
        return WARMING._replace(tenant=tenant)
    kind = _read(extra_args, CLASS, settings, _kind) or ""
    own = settings.classes.get(kind, NO_PROMISE)
    if own.background:
        for word in (TTFT, TBT):
            if word in extra_args:
                _complain(word, "its class is background, which is promised nothing")
        slo = Slo(weight=own.weight, background=True)
    else:
        first = _read(extra_args, TTFT, settings, lambda value, all: _seconds(value, all.floor.ttft))
        between = _read(extra_args, TBT, settings, lambda value, all: _seconds(value, all.shortest_claim))
        slo = settings.promise(own, first, between)
    return RequestTerms(kind, slo, _read(extra_args, GUESS, settings, _tokens), tenant)


def _read(given: Mapping[str, Any], word: str, settings: Settings, read: Reader) -> Any:
    if word not in given:
        return None
    name = word.removeprefix(PREFIX)
    if name not in settings.clients_may:
        _complain(word, f'clients may not set it; the setting clients_may = ["{name}", ...] allows it')
        return None
    try:
        return read(given[word], settings)
    except (ValueError, TypeError, OverflowError) as error:
        _complain(word, str(error))
        return None


def _complain(word: str, why: str) -> None:
    IGNORED[word] += 1
    if IGNORED[word] == 1:
        LOG.warning("headgate: %s of a request ignored, as all such later ones: %s", word, why)


def _clipped(value: object) -> str:
    """A value in an error message: a few characters of a text or a number, of anything else only its type."""
    if isinstance(value, str):
        return repr(value[:SHOWN])
    if isinstance(value, float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 64):
        return str(value)
    return f"a value of type {type(value).__name__}"


def _name(value: object, what: str) -> str:
    """A name that logs and metrics can show: half a surrogate pair would end them."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT or not value.isprintable():
        raise InputError(f"{_clipped(value)} is not a {what}; give 1 to {LONGEST_TEXT} printable characters")
    return value


def told_apart(tenant: str, known: set[str]) -> str:
    if tenant not in known:
        if len(known) >= MOST_TENANTS:
            return OTHER_TENANTS
        known.add(tenant)
    return tenant


def _kind(value: object, settings: Settings) -> str:
    value = _name(value, "class")
    if settings.classes:
        if value not in settings.classes:
            raise InputError(f"unknown class {_clipped(value)}; declare it under classes in the settings")
    elif value not in MADE_UP:
        if len(MADE_UP) >= MOST_CLASSES:
            raise InputError(f"more than {MOST_CLASSES} classes; declare yours under classes in the settings")
        MADE_UP.add(value)
    return value


def _seconds(value: object, floor: float) -> float:
    if isinstance(value, str) and len(value) <= LONGEST_TEXT:
        value = duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError(f"{_clipped(value)} is not a time above 0; write seconds, or 500ms")
    return max(floor, float(min(value, LONGEST_TIME)))


def _tokens(value: object, settings: Settings) -> int:
    if isinstance(value, str) and len(value) <= LONGEST_TEXT:
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(min(value, MOST_TOKENS))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{_clipped(value)} is not a number of tokens, 1 or more")
    return min(value, MOST_TOKENS)
