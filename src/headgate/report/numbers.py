"""Numbers as people read them: four digits, units that suit, intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headgate.stats.comparison import Difference
from headgate.stats.figures import Estimate


def number(value: float) -> str:
    """Four digits that matter."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:#.4g}"


def whole(value: float) -> str:
    """Without decimals."""
    return "-" if math.isnan(value) else f"{value:,.0f}"


def percent(share: float) -> str:
    """A share in percent."""
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def signed(percent: float) -> str:
    """A change in percent; no decimals where they would not matter."""
    return f"{percent:+,.0f}" if abs(percent) >= 99.95 else f"{percent:+.1f}"


def interval(estimate: Estimate, scale: float = 1.0) -> str:
    """An interval, a dash when there is none."""
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"[{number(estimate.low * scale)}, {number(estimate.high * scale)}]"


def change(found: Difference) -> str:
    """The paired difference in percent with its interval; a dash when the baseline is zero."""
    percent = found.percent
    if math.isnan(percent.value):
        return "-"
    if percent.low is None or percent.high is None:
        return signed(percent.value)
    return f"{signed(percent.value)} [{signed(percent.low)}, {signed(percent.high)}]"


def time_unit(seconds: float) -> tuple[float, str]:
    """Milliseconds below a second."""
    return (1.0, "s") if seconds >= 1 else (1000.0, "ms")


def timed(seconds: float) -> str:
    """In seconds or milliseconds, with four digits."""
    scale, unit = time_unit(seconds)
    return f"{number(seconds * scale)} {unit}"


def fine_time(seconds: float) -> str:
    """In the unit that suits it, down to microseconds; the cost of one token is that small."""
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.4g} {unit}"


def plural(count: int, one: str) -> str:
    """So many of them."""
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """As one says it: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def sentence(note: str) -> str:
    """With a capital letter and a full stop."""
    return f"{note[:1].upper()}{note[1:]}{'' if note.endswith(('.', ':')) else '.'}"
