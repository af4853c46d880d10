"""Table 18 of the EB paper: requests within targets of TTFT and TPOT, RTX PRO 6000, c = 512."""

from __future__ import annotations

from math import isfinite
from statistics import fmean

from headgate_papers.eb import table3
from headgate_papers.eb.published import CARDS, RTX, TABLE18
from headgate_papers.report import Cell, Count, Report, Row, Section
from headgate_papers.serving import Job, Options, Outcomes

NAME = "eb-table18"
ABOUT = "share of requests within TTFT and TPOT targets, RTX PRO 6000, c = 512"
CARD = CARDS[RTX, "8B"]
SCENE = "c=512"
LEVEL = 1.0  # points of percentage within which two policies are level
THETAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
PAPER = "mode paper"  # eb-paper: theta_0 + Delta theta, equation (5), capped as in the public code
SHOWN: tuple[float | str, ...] = (0.3, 0.5, PAPER)


def jobs(options: Options) -> list[Job]:
    """The three policies of the table, and EB with fixed thresholds to see what the threshold does."""
    load = table3.loads(options)[SCENE]
    named = [Job(policy, CARD, load, policy, {}, table3.SLOTS) for policy in table3.POLICIES]
    fixed = [Job(theta, CARD, load, "eb", {"refill": round(theta * 512)}, 512) for theta in THETAS]
    return [*named, *fixed, Job(PAPER, CARD, load, "eb-paper", {}, table3.SLOTS)]


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Attainment in percent, the winner of each cell."""
    rows = tuple(_row(outcomes, targets, published) for targets, published in TABLE18.items())
    fixed = tuple(_fixed(outcomes, targets, published[1]) for targets, published in TABLE18.items())
    pairs: list[tuple[object, object]] = [(_winners(row, True), _winners(row, False)) for row in rows]
    served = [_order(row) for row in rows]
    return Report(
        NAME,
        "requests within both targets, percent",
        (
            f"Card {CARD}, closed loop of 512 clients, {options.requests(4000)} requests of 512/256 tokens "
            f"(uniform, +-50 %), N = {table3.SLOTS}, B = 16384; the runs are those of eb-table3.",
        ),
        (
            Section("Percent of all requests", "TTFT, TPOT", table3.COLUMNS, rows, points=True),
            Section(
                "EB with a fixed share theta of 512 slots, and by the paper's formula (paper: EB)",
                "TTFT, TPOT",
                tuple(way if isinstance(way, str) else f"theta={way}" for way in SHOWN),
                fixed,
                shared=True,
                points=True,
            ),
        ),
        (
            Count.of_pairs(f"the best policy of a cell (within {LEVEL:.0f} point: several)", pairs),
            Count.of_pairs(f"EB above, level with or below v1 (within {LEVEL:.0f} point)", served),
        ),
        _remarks(outcomes),
    )


def _remarks(outcomes: Outcomes) -> tuple[str, ...]:
    tpots = [f"{outcomes.figure(policy, 'tpot') * 1e3:.0f}" for policy in table3.POLICIES]
    ttfts = [f"{outcomes.figure(policy, 'ttft'):.1f}" for policy in table3.POLICIES]
    return (
        f"TPOT decides. Published means are 164, 78 and 90 ms (v1, EB, EB+), ours {', '.join(tpots)} ms; "
        f"mean TTFT 1.2, 8.3 and 5.1 s, ours {', '.join(ttfts)} s.",
        "On the published coefficients a refill costs little, so our eb-online keeps the threshold small: "
        "first tokens come soon, decodes are interrupted often. A larger theta buys TPOT with TTFT "
        f"(theta = 0.5 serves {_kept(outcomes):.2f} times what our EB serves).",
        "The published percentages are those of a larger threshold: of the fixed thetas "
        f"{THETAS[0]} to {THETAS[-1]} and mode paper, {_nearest(outcomes, 1)} of the published EB, "
        f"{_nearest(outcomes, 2)} of the published EB+.",
        "The paper's correction (5) alone asks for such thresholds with uniform outputs: mode paper has "
        f"a mean TTFT of {outcomes.figure(PAPER, 'ttft'):.1f} s and TPOT of "
        f"{outcomes.figure(PAPER, 'tpot') * 1e3:.0f} ms, the published EB+ 5.1 s and 90 ms.",
    )


def _kept(outcomes: Outcomes) -> float:
    """Throughput of EB with half the slots idle, by that of the adaptive one."""
    return outcomes.figure(0.5, "tokens") / outcomes.figure("eb-online", "tokens")


def _nearest(outcomes: Outcomes, place: int) -> str:
    """The threshold nearest to a published column, and by how much it misses on average."""
    misses = {
        theta: fmean(
            abs(published[place] - 100 * outcomes.within(theta, targets[0], targets[1] / 1e3))
            for targets, published in TABLE18.items()
        )
        for theta in (*THETAS, PAPER)
    }
    best = min(misses, key=misses.__getitem__)
    return f"{best} is within {misses[best]:.1f} points (mean over cells)"


def _row(outcomes: Outcomes, targets: tuple[int, int], published: tuple[float, float, float]) -> Row:
    cells = tuple(
        Cell(number, 100 * outcomes.within(policy, targets[0], targets[1] / 1e3))
        for number, policy in zip(published, table3.POLICIES, strict=True)
    )
    return Row(_setting(targets), cells)


def _fixed(outcomes: Outcomes, targets: tuple[int, int], published: float) -> Row:
    cells = [Cell(published, 100 * outcomes.within(theta, targets[0], targets[1] / 1e3)) for theta in SHOWN]
    return Row(_setting(targets), tuple(cells))


def _setting(targets: tuple[int, int]) -> str:
    return f"< {targets[0]} s, < {targets[1]} ms"


def _winners(row: Row, published: bool) -> frozenset[str]:
    """All within a point of the best."""
    values = [cell.published if published else cell.ours for cell in row.cells]
    if not all(isfinite(value) for value in values):
        return frozenset()
    return frozenset(
        name for name, value in zip(table3.COLUMNS, values, strict=True) if value >= max(values) - LEVEL
    )


def _order(row: Row) -> tuple[object, object]:
    """Published and ours: is EB above v1 (1), below (-1) or level (0)?"""
    v1, eb = row.cells[:2]
    return _side(eb.published - v1.published), _side(eb.ours - v1.ours)


def _side(difference: float) -> int:
    return 0 if abs(difference) <= LEVEL else 1 if difference > 0 else -1
