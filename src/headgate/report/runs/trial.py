"""`headgate trial`: the answer, the figures that may be compared, and how they came round by round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, isfinite

import numpy as np

from headgate.live.trial.findings import ArmFound, Findings, by_round
from headgate.live.trial.trial import Outcome
from headgate.report import document as doc
from headgate.report.charts import Axis, Chart, Series
from headgate.stats.switchback import (
    CANNOT_TELL,
    FEWEST_ROUNDS,
    KEPT,
    SAME,
    THROUGHPUT,
    TTFT,
    TTFT_P95,
    Change,
    Metric,
    Verdict,
)

FRESH = (
    "Each arm starts fresh in each of its blocks, so what a policy learns over many minutes is not judged. "
    "Intervals are about these minutes and this traffic; the unit of error is the round."
)
SECONDARY = "The first figure decides; the others are secondary, and one in twenty is wrong by chance."


def trial_page(outcome: Outcome, command: Sequence[str]) -> doc.Page:
    """The answer first; then figures, classes and rounds."""
    findings = outcome.findings
    sections = [doc.Section("", (_facts(outcome),))]
    for found in findings.found:
        title = f"{findings.arms[found.arm]} beside {findings.arms[0]}"
        if found.verdicts:
            sections.append(
                doc.Section(title, (_grid(findings, found, found.verdicts), *_classes(findings, found)))
            )
    sections.append(doc.Section("Round by round", (doc.Drawn(lambda: _charts(outcome)),), doc.PAGE_ONLY))
    notes = list(outcome.notes)
    notes += [findings.state.said()] if findings.state is not None else []
    notes += [_failures(findings, found) for found in findings.found if found.failed]
    notes += [SECONDARY] if any(len(found.verdicts) > 1 for found in findings.found) else []
    about = f"{doc.listed(findings.arms)}, {doc.plural(findings.rounds, 'round')}"
    return doc.plan_page("Trial", about, answer(findings), sections, notes, command, FRESH, answer_first=True)


def answer(findings: Findings) -> str:
    """One sentence for each arm."""
    return " ".join(_answer(findings, found) for found in findings.found)


def _answer(findings: Findings, found: ArmFound) -> str:
    arm, base, metric = findings.arms[found.arm], findings.arms[0], findings.primary
    if findings.rounds < FEWEST_ROUNDS:
        rounds = doc.plural(findings.rounds, "round")
        return f"Cannot tell: {rounds} of the {FEWEST_ROUNDS} that are needed."
    verdict = found.verdict(metric)
    if verdict is None and found.failed and metric in (TTFT, TTFT_P95):
        return f"Cannot tell: {_failures(findings, found)}"
    if verdict is None or verdict.change is None:
        state = findings.state.name if findings.state is not None else "idle"
        other = f"; --primary {found.verdicts[0].metric.name} can" if found.verdicts else ""
        return f"Cannot tell: {metric.title} cannot be compared on a server whose state is {state}{other}."
    change, both = verdict.change, _both(metric, verdict.change)
    if verdict.word == SAME:
        margin = "1 point" if metric.share else f"{metric.margin:.0%}"
        figures = f"{_shown(metric, change.arm)} and {_shown(metric, change.baseline)}"
        return f"No difference between {arm} and {base}: {metric.title} {figures}, less than {margin} apart."
    if verdict.word == CANNOT_TELL:
        later = _later(findings, verdict)
        ends = _interval(metric, change)
        return f"Cannot tell yet whether {arm} changes {metric.title}: {both}, {ends}.{later}"
    better, amount = "better" if verdict.better else "worse", _amount(metric, change)
    return f"{arm} is {better} than {base}: {metric.title} {both}, {amount} ({_interval(metric, change)})."


def _failures(findings: Findings, found: ArmFound) -> str:
    base, arm = found.failed or (0.0, 0.0)
    return (
        f"{doc.percent(arm)} of the requests failed under {findings.arms[found.arm]} and {doc.percent(base)} "
        f"under {findings.arms[0]}, so TTFT is not compared."
    )


def _later(findings: Findings, verdict: Verdict) -> str:
    if verdict.rounds_missing is None:
        return " No end is in sight."
    return f" Roughly {doc.plural(ceil(findings.minutes(verdict.rounds_missing)), 'more minute')}."


def _facts(outcome: Outcome) -> doc.Facts:
    findings = outcome.findings
    arms, state = len(findings.arms), findings.state
    minutes = findings.minutes(findings.rounds)
    facts = {
        "arms": f"{', '.join(findings.arms)}; the first is the baseline",
        "rounds": f"{findings.rounds} of {arms} blocks of {findings.block:g} s, {minutes:.0f} minutes; "
        f"the first {findings.burn:g} s of each block are left out",
    }
    if state is not None:
        facts["state"] = f"{state.name}, backlog {state.low:.1f} to {state.high:.1f} s"
    if outcome.stopped:
        facts["ended"] = outcome.stopped
    return doc.Facts.of(facts)


def _grid(findings: Findings, found: ArmFound, verdicts: Sequence[Verdict], title: str = "") -> doc.Grid:
    ordered = sorted(verdicts, key=lambda verdict: verdict.metric is not findings.primary)
    heads = ("figure", findings.arms[0], findings.arms[found.arm], "change", "interval", "word")
    return doc.Grid(title, heads, tuple(_row(findings, verdict) for verdict in ordered))


def _row(findings: Findings, verdict: Verdict) -> doc.Row:
    metric, change = verdict.metric, verdict.change
    if change is None:
        return doc.row(metric.title, "-", "-", "-", "-", CANNOT_TELL)
    word = verdict.word
    if word == CANNOT_TELL and verdict.rounds_missing is not None:
        word += f", ~{ceil(findings.minutes(verdict.rounds_missing))} min more"
    tone = "words" if verdict.better is None else "words good" if verdict.better else "words bad"
    scale = 100.0
    unit = " points" if metric.share else " %"
    return doc.row(
        metric.title,
        doc.valued(_shown(metric, change.baseline), change.baseline),
        doc.valued(_shown(metric, change.arm), change.arm),
        doc.valued(doc.signed(scale * change.value) + unit, scale * change.value),
        doc.Cell(_ends(change)),
        doc.Cell(word, tone=tone),
    )


def _classes(findings: Findings, found: ArmFound) -> list[doc.Grid]:
    return [_grid(findings, found, one, f"class {kind or '(none)'}") for kind, one in found.by_class.items()]


def _charts(outcome: Outcome) -> Iterable[doc.Figure | str]:
    findings = outcome.findings
    metrics = dict.fromkeys(verdict.metric for found in findings.found for verdict in found.verdicts)
    for metric in metrics:
        rows = by_round(outcome.book, findings.arms, metric)
        if not rows:
            continue
        scale, unit = (
            (100.0, "%") if metric.share else (1.0, "/s") if metric is THROUGHPUT else (1000.0, "ms")
        )
        rounds = np.arange(1.0, len(rows) + 1)
        series = []
        for place, name in enumerate(findings.arms):
            figures = [row[place] for row in rows]
            values = np.array([np.nan if figure is None else scale * figure for figure in figures])
            series.append(Series(name, rounds, values, colour=place, shape="linked"))
        chart = Chart(Axis("round", whole=True), Axis(metric.title, unit), series)
        look = "Each point is a block after its burn-in; arms of one round met much the same traffic."
        yield chart.figure(metric.title, look)


# -- figures as people read them


def _shown(metric: Metric, value: float) -> str:
    if metric.share:
        return doc.percent(value)
    return f"{value:,.0f}" if metric is THROUGHPUT else doc.timed(value)


def _both(metric: Metric, change: Change) -> str:
    return f"{_shown(metric, change.arm)} instead of {_shown(metric, change.baseline)}"


def _amount(metric: Metric, change: Change) -> str:
    word = "less" if change.value < 0 else "more"
    size = abs(100 * change.value)
    return f"{size:.1f} points {word}" if metric is KEPT else f"{size:.1f} % {word}"


def _interval(metric: Metric, change: Change) -> str:
    unit = "points" if metric.share else "%"
    return f"interval {_ends(change)} {unit}"


def _ends(change: Change) -> str:
    high = doc.signed(100 * change.high) if isfinite(change.high) else "any"
    low = doc.signed(100 * change.low) if isfinite(change.low) else "any"
    return f"{low} to {high}"
