"""Table 2 of the EB paper: requests/s of v0, v1 and EB(k̂*) on four data sets, two models, two GPUs."""

from __future__ import annotations

from math import isfinite

from headgate_papers.eb.lengths import DATA_SETS, WILDCHAT_PROMPT
from headgate_papers.eb.published import CARDS, TABLE2
from headgate_papers.report import Cell, Count, Report, Row, Section, sign_pairs, spread
from headgate_papers.serving import Job, Load, Options, Outcomes

NAME = "eb-table2"
ABOUT = "requests/s of v0, v1 and EB on ShareGPT, LongBench, WildChat, NuminaMath lengths; 8B, 30B; two GPUs"
COLUMNS = ("v0", "v1", "EB")
POLICIES = ("v0", "mixed", "eb-online")
GRID = ((8192, 256), (16384, 512), (16384, 1024))  # (B, N); the best is reported, as in the paper
LONG_GRID = GRID[:2]  # NuminaMath: the paper's best N is 256 or 512 in nine of twelve cases
REQUESTS, LONG_REQUESTS = 4000, 2000
CLIENTS = 2048
LONG = "NuminaMath"
FORCED = {"LongBench": "LongBench, 20", "NuminaMath": "NuminaMath, 4000"}


def jobs(options: Options) -> list[Job]:
    """Every grid point of every cell."""
    return [
        Job((card, name, forced, policy, point), card, load, policy, {}, slots=point[1], budget=point[0])
        for card in CARDS.values()
        for name in DATA_SETS
        for forced, load in _loads(name, options).items()
        for point in grid_of(name)
        for policy in POLICIES
    ]


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Ratios and the sign of EB against v1, in the variant that fits the paper's runs."""
    tables = [_section(outcomes, gpu, model) for gpu, model in CARDS]
    main = {table.title: [row for row in table.rows if row.setting not in FORCED] for table in tables}
    rows = [row for found in main.values() for row in found]
    ratios = {
        setting: [cell.ratio for row in rows if row.setting == setting for cell in row.cells]
        for setting in dict.fromkeys(row.setting for row in rows)
    }
    known = {name: [ratio for ratio in found if isfinite(ratio)] for name, found in ratios.items()}
    return Report(
        NAME,
        "requests per second on real lengths",
        (
            f"Closed loop of {CLIENTS} clients, {options.requests(REQUESTS)} requests "
            f"({LONG}: {options.requests(LONG_REQUESTS)}); best of (B, N) in {', '.join(map(str, GRID))} "
            f"({LONG}: the first two). The paper searched B 4096..18432, N 256..2048.",
            "We do not have the data sets. Lengths are drawn from gamma and log-normal laws with the "
            "published mean, deviation, range and cap, prompts and outputs independent.",
            f"WildChat prompts are not published; a mean of {WILDCHAT_PROMPT} is chosen so that EB, 8B "
            "on H200 comes out as published; that cell is no test, the other eleven are.",
        ),
        tuple(tables),
        _counts(main),
        _remarks(known, tables),
    )


def _loads(name: str, options: Options) -> dict[bool, Load]:
    """The data set's own outputs and, where the runs forced a length, those (True)."""
    data = DATA_SETS[name]
    many = options.requests(LONG_REQUESTS if name == LONG else REQUESTS)
    found = {False: Load(many, CLIENTS, data.prompt, data.output)}
    if data.forced is not None:
        found[True] = Load(many, CLIENTS, data.prompt, data.forced)
    return found


def grid_of(name: str) -> tuple[tuple[int, int], ...]:
    """The points that are tried for a data set."""
    return LONG_GRID if name == LONG else GRID


def _section(outcomes: Outcomes, gpu: str, model: str) -> Section:
    card, rows = CARDS[gpu, model], []
    for name, data in DATA_SETS.items():
        for forced in (False, True) if data.forced is not None else (False,):
            cells = tuple(
                Cell(published, _best(outcomes, card, name, forced, policy))
                for published, policy in zip(TABLE2[gpu, model, name], POLICIES, strict=True)
            )
            rows.append(Row(FORCED[name] if forced else name, cells))
    return Section(f"{gpu}, Qwen3-{model}, card {card}: requests/s", "lengths", COLUMNS, tuple(rows))


def _best(outcomes: Outcomes, card: str, name: str, forced: bool, policy: str) -> float:
    """The best of the grid, as the paper reports it."""
    found = [outcomes.figure((card, name, forced, policy, point), "requests") for point in grid_of(name)]
    return max((rate for rate in found if isfinite(rate)), default=float("nan"))


def _counts(main: dict[str, list[Row]]) -> tuple[Count, ...]:
    """Signs of EB against v1, and which of the three is best, of 8B (measured mixed price) and 30B apart."""
    counts = []
    for model in ("8B", "30B"):
        rows = [row for title, found in main.items() if f"-{model}," in title for row in found]
        pairs = [(row.cells[1], row.cells[2]) for row in rows]
        best: list[tuple[object, object]] = [(_winner(row, True), _winner(row, False)) for row in rows]
        what = f"{model}: EB above or below v1 (published differences above 1 %)"
        counts += [
            Count.of_pairs(what, sign_pairs(pairs)),
            Count.of_pairs(f"{model}: the best of the three", best),
        ]
    return tuple(counts)


def _winner(row: Row, published: bool) -> str:
    values = [cell.published if published else cell.ours for cell in row.cells]
    return COLUMNS[values.index(max(values))]


def _remarks(ratios: dict[str, list[float]], tables: list[Section]) -> tuple[str, ...]:
    own = {
        name: [
            ratio for table in tables for row in table.rows if row.setting == name for ratio in _known(row)
        ]
        for name in FORCED
    }
    v0 = [row.cells[0].ratio for table in tables for row in table.rows if row.setting == "ShareGPT"]
    return (
        "Ratios by lengths: " + "; ".join(f"{name} {spread(found)}" for name, found in ratios.items()) + ".",
        f"NuminaMath with the published mean output of 1039 serves {spread(own['NuminaMath'])} times the "
        "published; with the 4000 tokens that the authors' scripts force on every request "
        f"{spread(ratios['NuminaMath, 4000'])}. LongBench is prefill, so 11 or 20 output tokens change "
        "little "
        f"({spread(own['LongBench'])} and {spread(ratios['LongBench, 20'])}). Counts use the forced lengths.",
        "What NuminaMath keeps too much of: the cards have no price per context token (measured at context "
        "512), so decodes over thousands of tokens are too cheap.",
        f"v0 on ShareGPT is {spread(v0)} times the published: a prefill step costs its kernel here; "
        "the authors' engine seems to lose far more at every change of phase, which v0 makes most "
        "often.",
        "8B on RTX PRO 6000: mixed steps are priced by a polynomial fitted to whole runs of other lengths, "
        "pure ones by their kernels, so v1 comes out slow, and EB fast where prompts are short.",
        "The 30B cards have no published mixed price; theirs is our assumption (docs/cards.md), so the signs "
        "of the 30B half say nothing about the paper.",
    )


def _known(row: Row) -> list[float]:
    return [cell.ratio for cell in row.cells if isfinite(cell.ratio)]
