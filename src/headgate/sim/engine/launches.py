"""When the host looks again after it has composed and launched a step while the step before it runs."""

from __future__ import annotations

from math import inf

from headgate.cost.model import Shape, StepCost
from headgate.sim.engine.steps import LONG, Pace, needed, step_ends

Price = tuple[float, float, float]  # a cost's decode line and the least a step takes
Moments = tuple[int, float, float, float, float, float]


def moments(ends: list[float]) -> Moments:
    """How many, the first two and the last three; of fewer than that some are the same."""
    count = len(ends)
    near = [ends[max(count - back, 0)] for back in (3, 2, 1)]
    return count, ends[0], ends[1 if count > 1 else 0], near[0], near[1], near[2]


class Launches(Pace):
    """The times of an asynchronous engine, step after step; `Ahead` has the equations.

    Kernels run while later ones are launched: a step takes its time from the end of the step before it or
    from its composing on, and is not done before the last of it has been launched. What is returned is not
    the end of the step, which is `done`, but the moment at which the tokens of the step before it are seen
    and the next one may be composed.
    """

    __slots__ = ("_host", "_spent", "done")

    def __init__(self, cost: StepCost) -> None:
        host = cost.host
        super().__init__(cost.unhosted() if host else cost)
        self._host = host
        self._spent: dict[int, float] = {}  # the host's seconds for a step of so many decodes
        self.done = -inf  # when the GPU has done all that was launched
        self.by_chunk = self.by_chunk or host is not None  # it counts prompts

    def prompts_end(self, start: float, shape: Shape) -> float:
        """A step with prompts, composed at `start`."""
        before = self.done
        end = super().prompts_end(max(start, before), shape)
        launched = start if self._host is None else start + self._host.seconds(shape)
        self.done = max(end, launched)
        return max(max(start, before), launched)

    def decode_ends(self, decodes: int, context: int, most: int, start: float, stop: float) -> list[float]:
        """Decode steps, the first composed at `start`, each other as soon as the one before it may be left.

        None but the first is composed at or after `stop`. All of them wait for the GPU, or all for the host,
        and a change of phase stands alone, so from the second on their times lie on a straight line.
        """
        return self._listed(self._line(decodes), decodes, context, most, start, stop)

    def _listed(
        self, price: Price, decodes: int, context: int, most: int, start: float, stop: float
    ) -> list[float]:
        fixed, slope, least = price
        spent = self._host_seconds(decodes)
        more, self._more = self._more, 0.0
        first = fixed + slope * context
        if first < least:
            first = least
        if more:
            most = 1
        if start + spent <= self.done and spent <= first:  # nor later: steps do not get shorter
            begun = self.done
            line = fixed, slope
            ends = step_ends(self._cost, line, decodes, context, most, begun, stop, more, least)
            self.done = ends.pop()
            ends.insert(0, begun)
            return ends
        now, done, late = start, self.done, start + spent > self.done
        ends = []
        for read in range(context, context + most * decodes, decodes):
            launched = now + spent
            if ends and (now >= stop or (launched > done) is not late):
                break
            end = max(now, done) + (max(fixed + slope * read, least) + more)
            now, done = max(max(now, done), launched), max(end, launched)
            ends.append(now)
        self.done = done
        return ends

    def decode_moments(self, decodes: int, context: int, most: int, start: float, stop: float) -> Moments:
        """The `moments` of the same; they are not listed where all steps wait for the GPU."""
        price = fixed, slope, least = self._line(decodes)
        spent, seconds = self._host_seconds(decodes), fixed + slope * context
        if seconds < least:
            seconds = least
        if not (self._more or start + spent > self.done or spent > seconds):
            few = needed(most, seconds, self.done, stop) if most >= LONG else most
            if few < LONG:
                return self._on_the_gpu(price, seconds, decodes, context, few, stop)
        return moments(self._listed(price, decodes, context, most, start, stop))

    def _on_the_gpu(
        self, price: Price, seconds: float, decodes: int, context: int, most: int, stop: float
    ) -> Moments:
        """All of them wait for the GPU; the first takes so many seconds."""
        fixed, slope, least = price
        third = before = last = first = self.done
        read, end, count = context, first + seconds, 1
        second = end
        while end < stop and count < most:
            read += decodes
            third, before, last = before, last, end
            seconds = fixed + slope * read
            if seconds < least:
                seconds = least
            end += seconds
            count += 1
        self.done = end
        return count, first, second, third, before, last

    def _host_seconds(self, decodes: int) -> float:
        if self._host is None:
            return 0.0
        spent = self._spent.get(decodes)
        if spent is None:
            spent = self._spent[decodes] = self._host.seconds(Shape(decodes))
        return spent
