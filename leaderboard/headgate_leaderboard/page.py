"""`leaderboard`: a table per promise with bars and the bound, and the same page as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headgate.report import document as doc
from headgate.report.charts import Bar, Bars, Mark
from headgate.stats.figures import Estimate
from headgate_leaderboard.board import FAIR_AT, FEW, LOADS, Board, Line, Standing, gain, standing

WIDTH = 8  # characters of a bar that reaches the bound
EIGHTHS = " ▏▎▍▌▋▊▉█"
_SHOWN = ", ".join(f"{load:.2f}" for load in LOADS)
CAPACITY = (
    "Capacity: the highest load that keeps the promise, in percent of λ*, the rate that no policy exceeds. "
    "100: at λ* the run ended before the policy fell behind. In brackets the difference from {baseline}, "
    "paired by seed; = is none beyond a 95 % interval and a step of the grid, 3 %"
)
UNSURE = f"; with fewer than {FEW} seeds nothing is known of that: ?"
KEPT = (
    f"Kept: the share of requests that were kept all of the promise, in percent, at {_SHOWN} of λ*; then "
    f"that share among the longest quarter of prompts over the shortest quarter's, at {FAIR_AT:.2f}"
)
NO_RANK = "There is no overall rank: which promise and which traffic are yours decides."
Lines = Mapping[tuple[str, str], Sequence[Line]]  # by policy and trace
Standings = Mapping[tuple[str, str], Standing]


def leaderboard_page(board: Board, lines: Lines, policies: Sequence[str], command: Sequence[str]) -> doc.Page:
    traces = [name for name in board.settings.traces if any((policy, name) in lines for policy in policies)]
    bounds = {
        name: next(rows[0]["bound"] for (_, own), rows in lines.items() if own == name) for name in traces
    }
    shown = {key: rows for key, rows in lines.items() if key[0] in policies}
    sections = [doc.Section("", (_facts(board, shown, bounds),))]
    for promise, levels in board.promises.items():
        tables = {
            key: standing(rows, promise)
            for key, rows in lines.items()
            if key[1] in traces and promise in rows[0]["ratio"]
        }
        baseline = board.settings.baseline
        blocks = (
            _grid("Capacity", tables, policies, bounds, baseline),
            _bars(tables, policies, bounds),
            _grid("Kept", tables, policies, bounds, baseline),
        )
        said = "; ".join(str(level) for level in levels)
        sections.append(doc.Section(f"{promise}: {said}", blocks))
    cells, whole = len(shown), len(policies) * len(board.settings.traces)
    verdict = f"Policies: {len(policies)}, traces: {len(traces)}. {NO_RANK}"
    unsure = any(len({line["seed"] for line in rows}) < FEW for rows in shown.values())
    notes = [CAPACITY.format(baseline=board.settings.baseline) + (UNSURE if unsure else ""), KEPT]
    own = {name: given["ttft"] for name, given in board.settings.traces.items() if "ttft" in given}
    notes += [f"On {name} the first token was promised within {first}" for name, first in own.items()]
    notes += [f"{whole - cells} of {whole} cells have no lines yet"] if cells < whole else []
    words = board.settings
    about = f"card {words.card}, {words.slots} slots, {words.budget:,} tokens a step"
    return doc.plan_page("Leaderboard", about, verdict, sections, notes, command)


def _facts(board: Board, lines: Lines, bounds: Mapping[str, float]) -> doc.Facts:
    every = [line for rows in lines.values() for line in rows]
    sizes = sorted({f"{line['requests']:,}" for line in every})
    seeds = sorted({len({line["seed"] for line in rows}) for rows in lines.values()})
    versions = sorted({line["version"] for line in every})
    facts = {
        "λ*, requests/s": ", ".join(f"{name} {doc.number(bound)}" for name, bound in bounds.items()),
        "Requests a run": " or ".join(sizes),
        "Seeds": " or ".join(map(str, seeds)),
        "Runs": f"{len(every):,}, {sum(line['cpu_seconds'] for line in every) / 60:.0f} minutes of one core",
        "Version": f"headgate {', '.join(versions)}",
    }
    return doc.Facts(facts)


def _grid(
    title: str, found: Standings, policies: Sequence[str], bounds: Mapping[str, float], baseline: str
) -> doc.Grid:
    rows = []
    for policy in policies:
        cells = []
        for trace in bounds:
            mine, base = found.get((policy, trace)), found.get((baseline, trace))
            if mine is None:
                cells.append(doc.Cell("-"))
            elif title == "Kept":
                cells.append(_kept(mine))
            else:
                share = mine.capacity.value
                change = "" if base is None or policy == baseline else f" ({_change(gain(mine, base))})"
                cells.append(doc.valued(f"{100 * share:.1f}{change}", share))
        rows.append(doc.row(policy, *cells))
    return doc.Grid(title, ("policy", *bounds), tuple(rows))


def _change(found: Estimate) -> str:
    if found.value != found.value:
        return "-"
    if found.low is None or found.high is None:
        return f"{100 * found.value:+.1f} %?"
    return "=" if found.low <= 0 <= found.high else f"{100 * found.value:+.1f} %"


def _kept(mine: Standing) -> doc.Cell:
    shares = " ".join(f"{100 * mine.kept[load]:.0f}" for load in LOADS)
    fair = "" if mine.long_to_short is None else f" · {mine.long_to_short:.2f}"
    return doc.valued(shares + fair, mine.kept[FAIR_AT])


def _bars(found: Standings, policies: Sequence[str], bounds: Mapping[str, float]) -> doc.Drawn:
    def drawn() -> Iterator[doc.Figure]:
        for trace, bound in bounds.items():
            items = []
            for policy in policies:
                if mine := found.get((policy, trace)):
                    value = mine.capacity.value
                    low, high = (end and bound * end for end in (mine.capacity.low, mine.capacity.high))
                    items.append(Bar(policy, "c0", bound * value, low, high))
            chart = Bars("load that keeps the promise", "requests/s", items, Mark("λ*", bound))
            yield chart.figure(trace, "How close each comes to λ*; the thin line is the interval.")

    return doc.Drawn(drawn)


def bar(share: float) -> str:
    eighths = max(0, min(8 * WIDTH, round(8 * WIDTH * share)))
    blocks = EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    return blocks.ljust(WIDTH, "·")


# -- Markdown

RESULTS = "<!-- results: made by headgate leaderboard --page -->"


def into_markdown(page: doc.Page, before: str) -> str:
    """A text with the tables of a page below its line `RESULTS`; what stood there goes."""
    (chapter,) = page.chapters
    parts = [before.partition(RESULTS)[0] + RESULTS, f"{chapter.verdict} {doc.sentence(page.about)}"]
    parts.append("\n".join(f"- {_plain(note)}" for note in chapter.notes))
    for section in chapter.sections:
        if section.title:
            parts.append(f"## By {section.title}")
        for block in section.blocks:
            if isinstance(block, doc.Facts):
                parts.append(
                    "\n".join(f"- {_plain(name)}: {_plain(text)}" for name, text in block.rows.items())
                )
            elif isinstance(block, doc.Grid):
                parts += [f"{block.title}:", _table(block, bars=block.title == "Capacity")]
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    return text.replace("*", r"\*")  # as in λ*, which is no emphasis


def _table(grid: doc.Grid, bars: bool) -> str:
    """Policies as code; `bars` are shares of the bound, above their figures so that all fit a page."""

    def said(cell: doc.Cell) -> str:
        return f"`{bar(cell.value)}▏`<br>{cell.text}" if bars and cell.value is not None else cell.text

    rows = [[f"`{row[0].text}`", *map(said, row[1:])] for row in grid.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [grid.heads, ["---"] * len(grid.heads), *rows])
