"""Speculative decoding in virtual time: which step of a request delivers how many tokens, drawn beforehand.

So n output tokens become m steps, a tick is a step as before, and the ends of requests are known. Decodes do
not grow by the same in every step any more: their growth stands in two lists by tick, tokens and KV blocks. A
request that joins adds its own, one that leaves early takes back what would still have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add, sub
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from headgate.core.ledger import Deliveries, Entry, Ledger
from headgate.cost.laws.speculation import Acceptance
from headgate.kv.blocks import Blocks
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload

SPARE = 24  # steps drawn beyond the mean, so that few requests must be drawn again
FORGET, RECENT = 4096, 64  # ticks behind the newest at which old ones are dropped, and those that stay


class Bursts:
    """The draws of all requests of a run: the same for every policy, and again after an eviction.

    A step delivers its own token and the drafts accepted before the first that is not, but never more than
    the output is long. A prompt that is done delivers one token.

    In memory a decode holds, as in vLLM, what it computes in a step and `ahead` tokens more. An asynchronous
    engine takes all drafts of the step on its way for accepted: it holds as much as that could make. That
    holds for the first step after a pause too, where vLLM knows better.
    """

    def __init__(
        self, engine: Engine, rates: Sequence[float], seeds: Sequence[int], asynchronous: bool
    ) -> None:
        assert engine.speculation is not None
        self.width = engine.width
        self._ahead, self._longest = engine.speculation.ahead, engine.longest
        self._rates, self._seeds = rates, seeds
        self._in_flight = self.width if asynchronous else 0
        # At most so many tokens more than its steps deliver are there for a decode, for bounds
        self.slack = 2 * self.width + self._ahead + self._in_flight

    def deliver(self, entry: Entry, remaining: int, size: int) -> None:
        rate = self._rates[entry.id]
        mean = float(self.width) if rate >= 1 else (1 - rate**self.width) / (1 - rate)  # tokens of a step
        steps = min(remaining, int(remaining / mean) + SPARE)
        drawn = self.draw(entry.id, entry.drawn + steps + 1)[entry.drawn :]
        sums = np.cumsum(drawn)
        last = int(np.searchsorted(sums, remaining))  # the step that brings its last token
        if last + 1 >= len(drawn):  # it had less luck than most
            drawn = self.draw(entry.id, entry.drawn + remaining + 1)[entry.drawn :]
            sums = np.cumsum(drawn)
            last = int(np.searchsorted(sums, remaining))
        if remaining:
            beyond = remaining + int(drawn[last + 1])
            sums = np.concatenate(([0], sums[:last], [remaining, beyond]))
        else:
            sums = np.array([0, int(drawn[0])])
        kv = entry.prompt + entry.generated - 1
        known = sums[:-1]
        if self._in_flight:
            known = np.concatenate(([0], sums[:-2] + self._in_flight))
        most = np.minimum(kv + known + self.width + self._ahead, self._longest)
        blocks = np.concatenate(([kv], most))
        blocks = np.maximum.accumulate(-(-blocks // size))
        entry.deliveries = Deliveries(sums.tolist(), blocks.tolist())

    def draw(self, id: int, steps: int) -> NDArray[np.int64]:
        """Tokens of each of its first steps, before the output cuts them; more steps begin alike."""
        rate = self._rates[id]
        if rate >= 1:
            return np.full(steps, self.width)
        draws = np.random.default_rng(self._seeds[id]).geometric(1 - rate, steps)
        return np.minimum(draws, self.width)


def spread(entry: Entry, ledger: Ledger, blocks: Blocks, by: int) -> None:
    """It begins to roll (by=1), or will not take the steps that are left (by=-1)."""
    deliveries, growth, growers = entry.deliveries, ledger.growth, blocks.growers
    assert deliveries is not None
    assert growth is not None
    begin, taken = ledger.tick - ledger.past, entry.taken
    if begin > FORGET:
        old = begin - RECENT
        del growth[:old], growers[:old]
        ledger.past += old
        blocks.past += old
        begin = RECENT
    sums, held = deliveries.sums[taken:], deliveries.blocks[taken:]
    end = begin + len(sums) - 1
    missing = end + 1 - len(growth)
    if missing > 0:
        growth.extend([0] * missing)
        growers.extend([0] * missing)
    change = sub if by < 0 else add
    growth[begin:end] = map(change, growth[begin:end], map(sub, sums[1:], sums))
    growers[begin:end] = map(change, growers[begin:end], map(sub, held[1:], held))


def drawn_rates(law: Acceptance, chance: np.random.Generator, requests: int) -> NDArray[np.float64]:
    if not 0 < law.mean < 1 or law.spread == np.inf:
        return np.full(requests, law.mean)
    return chance.beta(law.mean * law.spread, (1 - law.mean) * law.spread, requests)


def bursts_of(
    engine: Engine, workload: Workload, numbered: Callable[[Any], Any], asynchronous: bool = False
) -> Bursts | None:
    """What the requests of a workload draw on an engine that speculates, by number; None: it does not.

    The draws follow from the requests themselves: other requests draw otherwise.
    """
    speculation = engine.speculation
    if speculation is None:
        return None
    origin = crc32(workload.output.tobytes(), crc32(workload.prompt.tobytes()))
    chance = np.random.default_rng(origin)
    rates = np.empty(len(workload))
    for place, kind in enumerate(workload.kinds):
        mine = workload.kind == place
        rates[mine] = drawn_rates(speculation.of(kind.name), chance, int(np.count_nonzero(mine)))
    seeds = (np.arange(len(workload), dtype=np.int64) << 32) + origin
    return Bursts(engine, numbered(rates.tolist()), numbered(seeds.tolist()), asynchronous)
