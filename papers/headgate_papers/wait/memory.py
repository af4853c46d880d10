"""Nested WAIT's memory study: bound (15) by number of segments, and how often runs exceed (12)."""

from __future__ import annotations

from math import nan

from headgate_papers.report import LIMIT, Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes
from headgate_papers.wait.balance import filled
from headgate_papers.wait.rules import least_nested
from headgate_papers.wait.runs import FOR_EVER, Machine, Mix, Served, WaitJob, kind, segments_of, serve
from headgate_papers.wait.segments import (
    Segmentation,
    Segments,
    best_choice,
    choices,
    even_ends,
    memory_bound,
)

NAME = "wait-memory"
ABOUT = "Nested WAIT's memory: bound (15) by number of segments, and how often simulated runs exceed (12)"
MACHINE = Machine()
FREQUENCIES = (23, 11, 8, 7, 6, 4, 3, 2, 1, 1)  # ten bins of 50, uniform in each
COUNTS = (2, 4, 5, 10, 20, 50)
PROMPT, LONGEST, SLACK = 62, 500, 0.1
TOTAL, TOO_MUCH = 50, 500  # requests per second, both of the paper
HORIZONS, MISSES = (20.0, 200.0, 2000.0), (0.1, 1e-3, 1e-5)

# Runs against bound (12): short outputs, so that many runs are cheap.
SMALL = ((300.0, 2), (200.0, 4), (100.0, 8))
SMALL_PROMPT, SECONDS = 10, 5.0
RUNS = 200


def study(total: float, count: int) -> Segments:
    """500 lengths, uniform in ten bins, in so many segments."""
    share = total / sum(FREQUENCIES) / 50
    types = [(share * FREQUENCIES[(length - 1) // 50], length) for length in range(1, LONGEST + 1)]
    return segments_of(PROMPT, types, even_ends(LONGEST, count))


def small() -> Segments:
    """The types of the simulated check."""
    return segments_of(SMALL_PROMPT, SMALL)


def jobs(options: Options) -> list[WaitJob]:
    """Many short runs with memory to spare, each with its own arrivals."""
    segments = small()
    machine = MACHINE
    sizes = least_nested(machine.lines(segments.parts()), segments, machine.kv).sizes
    words = {"ends": "/".join(map(str, segments.ends)), "thresholds": "/".join(f"{n:g}" for n in sizes)}
    mix = Mix(tuple((rate, SMALL_PROMPT, length) for rate, length in SMALL))
    runs = RUNS // 10 if options.quick else RUNS
    return [
        WaitJob(number, machine, mix, SECONDS, "nested-wait", {**words, **FOR_EVER}) for number in range(runs)
    ]


def run(job: WaitJob, seed: int) -> Served:
    """One of them, with its own seed."""
    return serve(job, seed * 1_000_000 + int(str(job.key)))


def peaks(outcomes: Outcomes) -> list[float]:
    """The most KV of each run."""
    return [each.peak for number in range(RUNS) for each in outcomes.every(number)]


def found_for(total: float, horizon: float, miss: float) -> list[Segmentation]:
    """The bound for every number of segments."""
    candidates = [study(total, count) for count in COUNTS]
    lines = MACHINE.lines([kind(1, 1, 1)])
    return choices(lines, candidates, SLACK, miss, horizon)


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Bounds, terms, and the share of runs above the bound."""
    usual, shares = found_for(TOTAL, 200.0, 0.1), _shares(held := peaks(outcomes))
    kept: list[tuple[object, object]] = [(True, share <= miss) for miss, (_, share) in shares.items()]
    return Report(
        NAME,
        "memory that is enough with probability 1 - delta",
        (
            "d0 = 8 ms, d1 = 0.3 us per KV token. The study: 500 output lengths, uniform in ten bins, "
            "prompts of 62 tokens, slack 0.1 per segment, iterations 5 % above the shortest; T seconds are "
            "T/d0 iterations.",
            f"The check: {len(held)} runs of {SECONDS:g} s, outputs of 2, 4 and 8 iterations at 300, "
            "200 and 100 requests/s, thresholds (5, 3, 2), memory without limit.",
        ),
        (_formulas(), _bounds(usual), _best(), _exceeded(shares)),
        (
            Count.of_pairs("M^pi dominates bound (15) with 10 segments (paper: always)", _dominates()),
            Count.of_pairs("delta kept: no more runs above the bound than promised", kept, LIMIT),
        ),
        _remarks(usual, shares),
    )


def _dominates() -> list[tuple[object, object]]:
    """Is a full batch of ten segments the larger part of the bound? At every horizon and delta."""
    ten = [study(TOTAL, 10)]
    lines = MACHINE.lines([kind(1, 1, 1)])
    pairs: list[tuple[object, object]] = []
    for horizon in HORIZONS:
        for miss in MISSES:
            bound = choices(lines, ten, SLACK, miss, horizon)[0].bound
            pairs.append((True, bound is not None and bound.full > bound.waiting + bound.tail))
    return pairs


def _remarks(usual: list[Segmentation], shares: dict[float, tuple[float, float]]) -> tuple[str, ...]:
    best = len(best_choice(usual).segments.ends)
    hopeless = [f"{len(choice.segments.ends)}" for choice in usual if choice.bound is None]
    carried = any(choice.bound for choice in found_for(TOO_MUCH, 200.0, 0.1))
    return (
        "The paper's (11) and its section 7.2 do not count the KV of later segments right.",
        "With 50 requests/s, T = 200 s and delta = 0.1 the bound is U-shaped in the number of segments, as "
        f"the paper says; {best} segments need least. But the queues' term does not shrink with the rate "
        "and is the larger part with ten segments, contrary to the paper.",
        f"With {' or '.join(hopeless)} segments a full batch does not keep up with {TOTAL} requests/s. "
        f"{'Some' if carried else 'No'} number of segments keeps up with the paper's {TOO_MUCH}.",
        f"Of the simulated runs {100 * shares[0.5][1]:.1f} % held more than the bound for delta = 0.5: "
        "Doob's inequality and a sum over all iterations and segments are each generous.",
    )


def _formulas() -> Section:
    """A full batch by the printed formulas and by the right one."""
    lines = MACHINE.lines([kind(1, 1, 1)])
    four = segments_of(10, [(20, 20), (40, 40), (80, 80), (160, 160)])
    ten = segments_of(60, [(rate, 50 * place) for place, rate in enumerate(FREQUENCIES, 1)])
    rows = []
    for name, segments, sizes in (
        ("15:14:12:8", four, (15, 14, 12, 8)),
        ("66:43:...:1", ten, (66, 43, 32, 24, 17, 11, 7, 4, 2, 1)),
    ):
        ours = filled(lines, segments.parts(), sizes).kv
        rows.append(Row(name, (Cell(_printed(segments, sizes), ours), Cell(_even(segments, sizes), ours))))
    return Section("M^pi, KV tokens of a full batch", "thresholds", ("(11)", "sec. 7.2"), tuple(rows))


def _printed(segments: Segments, sizes: tuple[int, ...]) -> float:
    """Equation (11) as printed: l + half the running sum of all lengths so far."""
    total = running = 0.0
    for begin, end, size in zip((0, *segments.ends[:-1]), segments.ends, sizes, strict=True):
        running += end
        total += size * (end - begin) * (segments.prompt + running / 2)
    return total


def _even(segments: Segments, sizes: tuple[int, ...]) -> float:
    """Section 7.2 as printed, for segments of equal width; nothing where they are not."""
    width = segments.ends[0]
    if any(end != width * place for place, end in enumerate(segments.ends, 1)):
        return nan
    return sum(size * width * (segments.prompt + place * width / 2) for place, size in enumerate(sizes, 1))


def _bounds(usual: list[Segmentation]) -> Section:
    rows = []
    for choice in usual:
        if choice.bound is not None:
            terms = (*choice.bound[:3], choice.bound.total)
            rows.append(Row(f"L={len(choice.segments.ends)}", tuple(Cell(nan, term) for term in terms)))
    title = "Bound (15), 50/s, T = 200 s, delta = 0.1"
    return Section(title, "segments", ("M^pi", "n", "theta", "total"), tuple(rows))


def _best() -> Section:
    """The number of segments that needs least, and what ten need."""
    rows = []
    for horizon in HORIZONS:
        best = [len(best_choice(found_for(TOTAL, horizon, miss)).segments.ends) for miss in MISSES]
        rows.append(Row(f"{TOTAL}/s, T={horizon:g}", tuple(Cell(10, count) for count in best)))
    columns = tuple(f"delta={miss:g}" for miss in MISSES)
    return Section("Best number of segments (paper: 10 suffice)", "load", columns, tuple(rows), shared=True)


def _shares(held: list[float]) -> dict[float, tuple[float, float]]:
    """By δ: the bound, and the share of runs that held more."""
    segments = small()
    lines = MACHINE.lines(segments.parts())
    sizes = least_nested(lines, segments, MACHINE.kv).sizes
    found = {}
    for miss in (0.5, 0.1, 0.01):
        bound = memory_bound(lines, segments, sizes, miss, SECONDS / MACHINE.fixed).total
        found[miss] = bound, sum(peak > bound for peak in held) / len(held)
    return found


def _exceeded(shares: dict[float, tuple[float, float]]) -> Section:
    rows = [
        Row(f"delta={miss:g}", (Cell(miss, share), Cell(nan, bound)))
        for miss, (bound, share) in shares.items()
    ]
    title = "Share of runs that held more KV than (12)"
    return Section(title, "promise", ("share", "bound"), tuple(rows), against=LIMIT)
