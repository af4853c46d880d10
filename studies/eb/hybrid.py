"""EB+ against the better of mixed batching and online EB, cell by cell and through two shifts."""

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
    first_tokens,
    rate,
    requests,
    serve,
    short,
    show,
    staged,
)

MIXES = ("uniform 128/1024", "uniform 512/512", "uniform 1024/128", "sharegpt-like")
CLIENTS = (32, 512, 2048)
NUMBER = {32: 1000, 512: 3500, 2048: 7000}
POLICIES = ("mixed", "eb-online", "eb+")
LENGTHS = "uniform 512/256"
MOST = 0.98
STAGES = {
    "lengths": [(f"uniform {means}", 2000, 2048) for means in ("1024/128", "512/512", "128/1024")],
    "clients": [
        (LENGTHS, 300, 32),
        (LENGTHS, 2500, 512),
        (LENGTHS, 4000, 1024),
        (LENGTHS, 1500, 256),
        (LENGTHS, 5000, 2048),
    ],
}  # fmt: skip


class Cell(NamedTuple):
    """One comparison: a mix and clients, or the name of a shift."""

    card: str
    mix: str
    clients: int
    number: int


def compare(cell: Cell) -> Row:
    """Throughput and TTFT of the three."""
    on = engine(cell.card, 1024)
    if cell.clients:
        workload = requests(cell.mix, cell.number, cell.clients)
        first, last = max(cell.clients, cell.number // 5), cell.number - max(cell.clients, cell.number // 20)
    else:
        workload = staged(STAGES[cell.mix])
        first, last = 0, len(workload)
    row: Row = {"card": short(cell.card), "lengths": cell.mix, "clients": cell.clients}
    for policy in POLICIES:
        run = serve(on, policy, {}, workload)
        if cell.clients:
            row[policy] = rate(run, first, last)
        else:
            row[policy] = rate_until(run, MOST)
            row[f"to the last {policy}"] = rate_until(run, 1.0)
        row[f"TTFT {policy}"] = first_tokens(run, first, last)
        row[f"preemptions {policy}"] = int(run.requests["evictions"].sum())
        if policy == "eb+":
            row |= _modes(run)
    better = max(row["mixed"], row["eb-online"])
    row["loss %"] = 100 * (1 - row["eb+"] / better)
    if not cell.clients:
        last_ones = [row[f"to the last {policy}"] for policy in POLICIES]
        row["loss to the last %"] = 100 * (1 - last_ones[2] / max(last_ones[:2]))
    row["gain of eb %"] = 100 * (row["eb-online"] / row["mixed"] - 1)
    return row


def rate_until(run: Run, share: float) -> float:
    """Requests per second until that share has finished; the last ones of a run decode nearly alone."""
    times = finishes(run)
    last = int(share * len(times))
    return last / float(times[last - 1])


def _modes(run: Run) -> Row:
    """Share of the time in exclusive mode, and how often it changed."""
    mode, time = run.plans["gauge.exclusive"], run.plans["time"]
    held = np.diff(time, append=time[-1])
    return {
        "time in eb %": 100 * float((mode * held).sum() / held.sum()),
        "changes": int(np.count_nonzero(np.diff(mode))),
        "predicted gain %": 100 * float(np.nanmedian(run.plans["gauge.gain"])),
    }


def _columns(first: dict[str, str]) -> dict[str, str]:
    columns = first | {policy: ".2f" for policy in POLICIES} | {"loss %": ".2f", "gain of eb %": ".1f"}
    columns |= {"predicted gain %": ".1f", "time in eb %": ".0f", "changes": "d"}
    return columns | {f"TTFT {policy}": ".3f" for policy in POLICIES}


def _sum_up(rows: list[Row]) -> None:
    losses = [row["loss %"] for row in rows]
    missed = [row for row in rows if row["loss %"] > 2]
    print(f"\nloss: mean {np.mean(losses):.2f} %, worst {max(losses):.2f} %; cells above 2 %: {len(missed)}")
    for row in missed:
        print(f"- {row['card']}, {row['lengths']}, c={row['clients']}: {row['loss %']:.2f} %")
    few = [row for row in rows if row["clients"] == 32]
    others = [max(row["TTFT mixed"], row["TTFT eb-online"]) for row in few]
    worst = [row for row, other in zip(few, others, strict=True) if row["TTFT eb+"] > other * 1.0001]
    if few:
        print(f"worst TTFT of the three at c=32: {len(worst)} of {len(few)} cells")


def main(quick: bool) -> None:
    """Study 2."""
    cards = (CARDS[0], CARDS[2]) if quick else CARDS
    cells = [Cell(card, mix, c, NUMBER[c]) for card in cards for mix in MIXES for c in CLIENTS]
    rows = everywhere(compare, cells)
    show(
        "EB+ in steady load",
        rows,
        _columns({"card": "", "lengths": "", "clients": "d"}),
        "" if quick else "hybrid_steady",
    )
    _sum_up(rows)
    rows = everywhere(compare, [Cell(card, shift, 0, 0) for card in cards for shift in STAGES])
    for row in rows:
        row["shift of"] = row["lengths"]
    columns = _columns({"card": "", "shift of": ""}) | {"loss to the last %": ".2f"}
    show(
        f"EB+ through shifts; until {MOST:.0%} have finished", rows, columns, "" if quick else "hybrid_shift"
    )
    _sum_up(rows)
