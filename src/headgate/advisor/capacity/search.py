"""The largest rate that is sustained, the fewest engines that are enough: what to try, one by one."""

from __future__ import annotations

from math import ceil, isfinite, log

START = 0.7  # of the highest rate there can be
LEAST = 1 / 128  # below this share of it the answer is zero
ROUGH, ROUGH_LEAST = 0.1, 1 / 4  # width of a bracket, and lowest share, that a rough search is content with
MOST = 20  # rates tried
STEP = 0.95  # of the precision: the first step from a rate that was found before (the next ones double), and
# the last bracket's width; a guess within NEAR of that width from an end is near enough to make the last one
STEP_UP = 0.125  # of the least count: the first step up; the next ones double the way gone
NEAR = 0.75
INSIDE = 0.15  # a guess stays this far, as a share of the bracket, from its ends


class Search:
    """Looks for where a ratio that rises with the rate crosses one, between zero and `top`.

    `next` says which rate to try, `tell` takes the answer; so many searches can run at the same time. A
    bracket is narrowed by interpolating the logarithm of the ratio, and the answer is interpolated likewise.
    A rough search stops early; set `rough` to False and it goes on from there.
    """

    def __init__(self, top: float, precision: float, first: float = START, rough: bool = False) -> None:
        self.top = top
        self.precision = precision
        self.first = min(max(first, LEAST), 1.0)  # the share of `top` to try first
        self.rough = rough
        self.tried: dict[float, float] = {}
        self.spent = 0.0  # CPU seconds of its runs, wherever they ran

    @property
    def sustained(self) -> float:
        """The largest rate that was sustained, below every one that was not."""
        return max(
            (rate for rate, ratio in self.tried.items() if ratio <= 1 and rate < self.missed), default=0.0
        )

    @property
    def missed(self) -> float:
        """The smallest rate that was not sustained; above `top` when there is none."""
        return min((rate for rate, ratio in self.tried.items() if not ratio <= 1), default=2 * self.top)

    def tell(self, rate: float, ratio: float) -> None:
        """What came of a rate."""
        self.tried[rate] = ratio

    def next(self) -> float | None:
        """The next rate to try; None when the answer is known well enough."""
        if not self.tried:
            return self.first * self.top
        low, high = self.sustained, self.missed
        known = self.first != START  # a first rate that was found before is near the answer
        step = STEP * self.precision * 2 ** (len(self.tried) - 1)
        if high > self.top:
            above = min(low * (1 + step), self.top) if known else self.top
            return None if low >= self.top else above
        if not low:
            below = high * max(1 - step, 0.5) if known else high / 2
            return below if below >= (ROUGH_LEAST if self.rough else LEAST) * self.top else None
        enough = max(self.precision, ROUGH) if self.rough else self.precision
        if high - low <= enough * high or len(self.tried) >= MOST:
            return None
        return self._between(low, high, STEP * enough * high)

    def _between(self, low: float, high: float, last: float) -> float:
        """A rate in the bracket. Two answers in a row on one side say that interpolation creeps: the middle.
        A guess near an end is not tried itself, but a rate that most likely makes a bracket of width `last`.
        """
        *_, before, newest = (ratio <= 1 for ratio in self.tried.values())
        if before == newest:
            return (low + high) / 2
        guess, near = self._crossing(low, high), NEAR * last
        if guess - low <= near:
            return low + last
        if high - guess <= near:
            return high - last
        room = INSIDE * (high - low)
        return min(max(guess, low + room), high - room)

    @property
    def answer(self) -> float:
        """The rate at which the ratio is one."""
        low, high = self.sustained, self.missed
        return low if high > self.top or not low else self._crossing(low, high)

    def _crossing(self, low: float, high: float) -> float:
        below, above = self.tried[low], self.tried[high]
        if not (below > 0 and isfinite(above)):
            return (low + high) / 2
        return low + (high - low) * log(1 / below) / log(above / below)


class Fewest:
    """Looks for the smallest count that is enough, from `least` on, where no smaller one can be.

    It goes up in growing steps until a count is enough and halves what lies between, so the count found
    is enough and one fewer is not; with chance in the runs a smaller one might be again, and nobody looks.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most
        self.tried: dict[int, float] = {}

    @property
    def enough(self) -> int | None:
        """The smallest count that was enough."""
        return min((count for count, ratio in self.tried.items() if ratio <= 1), default=None)

    @property
    def too_few(self) -> int:
        """The largest count below it that was not, or cannot be."""
        below = self.enough or self.most + 1
        return max(
            (n for n, ratio in self.tried.items() if not ratio <= 1 and n < below), default=self.least - 1
        )

    def tell(self, count: int, ratio: float) -> None:
        """What came of a count."""
        self.tried[count] = ratio

    def next(self) -> int | None:
        """The next count to try; None when it is found, or `most` is too few."""
        enough, low = self.enough, self.too_few
        if enough is None:
            above = max(2 * (low - self.least), ceil(self.least * STEP_UP), 1) if self.tried else 0
            return None if low >= self.most else min(self.least + above, self.most)
        return None if enough - low <= 1 else (low + enough) // 2
