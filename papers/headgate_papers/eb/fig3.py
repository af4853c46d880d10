"""Figure 3 of the EB paper: tok/s against a fixed threshold k, beside v1 and the adaptive threshold."""

from __future__ import annotations

from math import nan

from headgate.workloads.lengths import Geometric, Uniform
from headgate_papers.eb.published import CARDS, H200
from headgate_papers.eb.published_figures import FIGURE3, SYNTHETIC
from headgate_papers.report import Cell, Count, Report, Row, Section, sign_pairs
from headgate_papers.serving import Job, Load, Options, Outcomes

NAME = "eb-fig3"
ABOUT = "tok/s by fixed threshold k, v1 and the adaptive threshold; geometric outputs, N = 1024, H200"
CARD, SLOTS, CLIENTS, REQUESTS = CARDS[H200, "8B"], 1024, 2048, 4000
FIXED = (16, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
SOME = (16, 512)
PUBLISHED = FIXED[2:]  # the paper's points begin at 128
COLUMNS = ("v1", "best k", "EB")


def jobs(options: Options) -> list[Job]:
    """v1, every fixed threshold and the adaptive one, for three kinds of lengths."""
    found = []
    for name, (prompt, output) in SYNTHETIC.items():
        load = Load(options.requests(REQUESTS), CLIENTS, Uniform(prompt), Geometric(output))
        found += [Job((name, k), CARD, load, "eb", {"refill": k}, SLOTS) for k in FIXED]
        found += [Job((name, "v1"), CARD, load, "mixed", {}, SLOTS)]
        found += [Job((name, "EB"), CARD, load, "eb-online", {}, SLOTS)]
    return found


def judge(outcomes: Outcomes, options: Options) -> Report:
    """The three curves, and what the paper reads off them."""
    rows = tuple(
        Row(name, tuple(Cell(published, _ours(outcomes, name, way)) for way, published in _pairs(name)))
        for name in FIGURE3
    )
    curve = tuple(
        Row(f"k={k}", tuple(Cell(nan, outcomes.figure((name, k), "tokens")) for name in FIGURE3))
        for k in FIXED
    )
    flat = [_spread(outcomes, name) for name in FIGURE3]
    return Report(
        NAME,
        "a fixed threshold, and the adaptive one",
        (
            f"Closed loop of {CLIENTS} clients, {options.requests(REQUESTS)} requests, prompts uniform "
            f"(+-50 %), outputs geometric; N = {SLOTS}, B = 16384; card {CARD}. 'best k' is the best of the "
            "paper's points, k = 128 to 1024.",
        ),
        (
            Section("tok/s", "lengths", COLUMNS, rows),
            Section("tok/s by fixed k", "threshold", tuple(FIGURE3), curve),
        ),
        (
            Count.of_pairs("EB above v1", sign_pairs([(row.cells[0], row.cells[2]) for row in rows])),
            Count.of_pairs(
                "EB above the best fixed k from 128 on (published differences above 1 %)",
                sign_pairs([(row.cells[1], row.cells[2]) for row in rows]),
            ),
            Count("k = 128 to 1024 within 5 % of each other", sum(each <= 5 for each in flat), len(flat)),
        ),
        (
            f"Fixed thresholds from 128 to 1024 differ by {min(flat):.1f} to {max(flat):.1f} % (published: "
            "at most 5 %), because k = 1024 lets the batch run empty: the longest of 1024 geometric outputs "
            "runs alone for long. The paper has its best run there or at 896.",
            f"Memory holds fewer than {SLOTS} of these requests. A small fixed threshold refills whatever "
            "fits and evicts: decode-heavy "
            + ", ".join(
                f"{outcomes.figure(('decode-heavy', k), 'evictions'):.0f} times at k = {k}" for k in SOME
            )
            + f", EB, with its forecast, {outcomes.figure(('decode-heavy', 'EB'), 'evictions'):.0f} times.",
        ),
    )


def _pairs(name: str) -> list[tuple[str, float]]:
    return list(zip(COLUMNS, FIGURE3[name][:3], strict=True))


def _ours(outcomes: Outcomes, name: str, way: str) -> float:
    if way == "best k":
        return max(outcomes.figure((name, k), "tokens") for k in PUBLISHED)
    return outcomes.figure((name, way), "tokens")


def _spread(outcomes: Outcomes, name: str) -> float:
    """Between the best and the worst of the paper's points, in percent of the worst."""
    found = [outcomes.figure((name, k), "tokens") for k in PUBLISHED]
    return 100 * (max(found) / min(found) - 1)
