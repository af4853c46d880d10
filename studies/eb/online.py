"""Online EB against the best fixed threshold: steady, short of memory, and after a shift of lengths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headgate.record.tables import Run
from studies.eb.worlds import (
    CARDS,
    Row,
    engine,
    everywhere,
    finishes,
    rate,
    requests,
    serve,
    short,
    show,
    staged,
)

MIXES = ("geometric 512/256", "gamma(2) 512/256", "uniform 512/256", "sharegpt-like", "numinamath-like")
SHARES = (0.0, 0.012, 0.02, 0.03, 0.045, 0.065, 0.09, 0.13, 0.19, 0.28, 0.5)
SLOTS = 256  # every card here holds that many of every mix
FEWER = {"pub-rtx-pro-6000-qwen3-30b-a3b": 128}  # with prompts of 1024
SHORT_OF = 60_000  # KV tokens of the setting that is short of memory
SHIFTS = (("uniform 1024/128", "uniform 128/1024"), ("uniform 128/1024", "uniform 1024/128"))


class Cell(NamedTuple):
    """One comparison."""

    card: str
    mix: str
    number: int
    seeds: int
    kv_tokens: int | None = None


def thresholds(slots: int) -> list[int]:
    """The values of k that are tried."""
    return sorted({max(1, round(share * slots)) for share in SHARES})


def compare(cell: Cell) -> Row:
    """The rate of online EB and of every fixed k (and N, where memory is short), the same for all seeds."""
    most = SLOTS
    grid = [most] if cell.kv_tokens is None else sorted({most * part // 16 for part in (3, 4, 5, 6, 8, 11)})
    tried = [(slots, refill) for slots in grid for refill in thresholds(slots)]
    sums, online, evicted = np.zeros(len(tried)), 0.0, 0
    for seed in range(cell.seeds):
        workload = requests(cell.mix, cell.number, 2 * most, seed)
        on = engine(cell.card, most, kv_tokens=cell.kv_tokens)
        first, last = 3 * most, cell.number - 2 * most
        for index, (slots, refill) in enumerate(tried):
            run = serve(on, "eb", {"slots": slots, "refill": refill}, workload)
            sums[index] += rate(run, first, last) / cell.seeds
        run = serve(on, "eb-online", {}, workload)
        online += rate(run, first, last) / cell.seeds
        evicted += int(run.requests["evictions"].sum())
    best = int(np.argmax(sums))
    return {
        "card": short(cell.card), "lengths": cell.mix, "N": tried[best][0], "best k": tried[best][1],
        "best fixed /s": float(sums[best]), "k of eb-online": float(np.mean(run.plans["gauge.refill"][-50:])),
        "eb-online /s": online, "regret %": 100 * (1 - online / float(sums[best])),
        "worst k %": 100 * (1 - float(sums.min()) / float(sums[best])), "preemptions": evicted,
    }  # fmt: skip


def steady(quick: bool) -> None:
    cells = [Cell(card, mix, 3000 if quick else 6000, 1) for card in CARDS for mix in MIXES]
    rows = everywhere(compare, cells)
    columns = {"card": "", "lengths": "", "best k": "d", "best fixed /s": ".2f", "k of eb-online": ".0f"}
    columns |= {"eb-online /s": ".2f", "regret %": ".2f", "worst k %": ".1f"}
    show(
        "Online EB against the best fixed k, memory not binding",
        rows,
        columns,
        "" if quick else "online_steady",
    )
    _sum_up(rows)


def short_of_memory(quick: bool) -> None:
    cells = [Cell("linear-h200-qwen3-8b", mix, 2500 if quick else 4000, 1, SHORT_OF) for mix in MIXES]
    rows = everywhere(compare, cells)
    columns = {"lengths": "", "N": "d", "best k": "d", "best fixed /s": ".2f", "k of eb-online": ".0f"}
    columns |= {"eb-online /s": ".2f", "regret %": ".2f", "worst k %": ".1f", "preemptions": "d"}
    show(
        f"The same on h200-8b with {SHORT_OF} KV tokens; N swept too",
        rows,
        columns,
        "" if quick else "online_short",
    )
    _sum_up(rows)


def _sum_up(rows: list[Row]) -> None:
    regrets = [row["regret %"] for row in rows]
    beyond = sum(regret > 2 for regret in regrets)
    print(f"\nregret: mean {np.mean(regrets):.2f} %, worst {max(regrets):.2f} %; above 2 %: {beyond}")


class Shift(NamedTuple):
    """A card and the lengths before and after."""

    card: str
    before: str
    after: str
    number: int


def shifted(shift: Shift) -> Row:
    """Regret in each stage against the fixed k that is best in that stage, and how fast k settles."""
    slots = FEWER.get(shift.card, SLOTS)
    n = shift.number
    workload = staged([(shift.before, n, 2 * slots), (shift.after, n, 2 * slots)])
    on = engine(shift.card, slots)
    windows = ((3 * slots, n - 2 * slots), (n + slots, n + 2 * slots), (n + 3 * slots, 2 * n - 2 * slots))
    fixed = [serve(on, "eb", {"refill": refill}, workload) for refill in thresholds(slots)]
    online = serve(on, "eb-online", {}, workload)
    regrets = [100 * (1 - rate(online, *at) / max(rate(run, *at) for run in fixed)) for at in windows]
    seconds, completions, final = settled(online, n)
    return {
        "card": short(shift.card), "shift": f"{shift.before[8:]} to {shift.after[8:]}",
        "before: regret %": regrets[0], "first turnover: regret %": regrets[1], "after: regret %": regrets[2],
        "k after": final, "settled after s": seconds, "completions": completions,
        "one request takes s": _stay(online, n + 2 * slots, 2 * n - 2 * slots),
    }  # fmt: skip


def settled(run: Run, first: int) -> tuple[float, int, float]:
    """How long after request `first` entered k stays within 10 % of its final value: s, finishes, k."""
    began = float(run.requests["admitted"][first])
    held = ~np.isnan(run.plans["gauge.refill"]) & (run.plans["time"] >= began)
    times, values = run.plans["time"][held], run.plans["gauge.refill"][held]
    done = finishes(run)
    end = done[len(done) - 1100]
    times, values = times[times < end], values[times < end]
    final = float(np.median(values[len(values) // 2 :]))
    wrong = np.flatnonzero(np.abs(values - final) > max(0.1 * final, 1.0))
    place = int(wrong[-1]) + 1 if len(wrong) else 0
    at = float(times[min(place, len(times) - 1)])
    return at - began, int(np.searchsorted(done, at) - np.searchsorted(done, began)), final


def _stay(run: Run, first: int, last: int) -> float:
    rows = slice(first, last)
    return float(np.mean((run.requests["finished"] - run.requests["admitted"])[rows]))


def shifts(quick: bool) -> None:
    cells = [Shift(card, *pair, 2000 if quick else 4000) for card in CARDS for pair in SHIFTS]
    rows = everywhere(shifted, cells)
    columns = {"card": "", "shift": "", "before: regret %": ".2f", "first turnover: regret %": ".2f"}
    columns |= {"after: regret %": ".2f", "k after": ".0f", "settled after s": ".0f", "completions": "d"}
    columns |= {"one request takes s": ".0f"}
    show("Online EB through a shift of lengths", rows, columns, "" if quick else "online_shift")


def main(quick: bool) -> None:
    """Study 1."""
    steady(quick)
    short_of_memory(quick)
    shifts(quick)
