"""`headgate trial`: the answer, the figures that may be compared, and how they came round by round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite

import numpy as np

from headgate.core.request import Slo
from headgate.live.trial.arms import Arm
from headgate.live.trial.book import ArmFound, Findings, by_round
from headgate.live.trial.trial import Outcome
from headgate.report import document as doc
from headgate.report.charts import Axis, Chart, Series
from headgate.report.runs.grids import within
from headgate.settings_base import BETWEEN_SHOWN
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
UNBOUNDED = "cannot be bounded yet"
TOO_SLOW = "Cannot tell: this machine is too slow for this load."
SECONDARY = "The first figure decides; the others are secondary, and one in twenty is wrong by chance."


def trial_page(
    outcome: Outcome,
    arms: Sequence[Arm],
    promises: Mapping[str | None, Slo],
    about: Mapping[str, str],
    command: Sequence[str],
) -> doc.Page:
    findings = outcome.findings
    facts = {**about, "promises": _promised(promises), **_facts(outcome)}
    counts = zip(arms, findings.requests, findings.failed, strict=True)
    rows = (doc.row(arm.name, doc.Cell(arm.said(), tone="prose"), *numbers) for arm, *numbers in counts)
    heads = ("arm", "what it is", "requests judged", "failed")
    judged = doc.Grid("", heads, tuple(rows), ("The first is the baseline.",))
    sections = [doc.Section("", (doc.Facts(facts),)), doc.Section("Arms", (judged,))]
    for found in findings.found:
        title = f"{findings.arms[found.arm]} beside {findings.arms[0]}"
        if found.verdicts:
            grids = [_grid(findings, found, found.verdicts)]
            for kind, one in found.by_class.items():
                grids.append(_grid(findings, found, one, f"class {kind or '(none)'}"))
            sections.append(doc.Section(title, tuple(grids)))
    sections.append(doc.Section("Round by round", (doc.Drawn(lambda: _charts(outcome)),), doc.PAGE_ONLY))
    notes = [findings.state.said()] if findings.state is not None else []
    notes += [_failures(findings, found) for found in findings.found if found.failed]
    notes += [SECONDARY] if any(len(found.verdicts) > 1 for found in findings.found) else []
    return doc.plan_page(
        title="Trial",
        about=f"{doc.listed(findings.arms)}, {doc.plural(findings.rounds, 'round')}",
        verdict=TOO_SLOW if outcome.too_slow else answer(findings),
        sections=sections,
        notes=notes,
        command=command,
        caution=FRESH,
        answer_first=True,
        alarms=outcome.notes,
    )


def answer(findings: Findings) -> str:
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
    change = verdict.change
    both = f"{metric.shown(change.arm)} instead of {metric.shown(change.baseline)}"
    if verdict.word == SAME:
        margin = "1 point" if metric.share else f"{metric.margin:.0%}"
        figures = f"{metric.shown(change.arm)} and {metric.shown(change.baseline)}"
        return f"No difference between {arm} and {base}: {metric.title} {figures}, less than {margin} apart."
    if verdict.word == CANNOT_TELL:
        later, ends = "No end is in sight.", _interval(metric, change)
        if verdict.rounds_missing is not None:
            minutes = ceil(findings.minutes(verdict.rounds_missing))
            later = f"Roughly {doc.plural(minutes, 'more minute')}."
        return f"Cannot tell yet whether {arm} changes {metric.title}: {both}, {ends}. {later}"
    better, word = "better" if verdict.better else "worse", "less" if change.value < 0 else "more"
    amount = f"{abs(100 * change.value):.1f} {'points' if metric is KEPT else '%'} {word}"
    return f"{arm} is {better} than {base}: {metric.title} {both}, {amount} ({_interval(metric, change)})."


def _failures(findings: Findings, found: ArmFound) -> str:
    base, arm = found.failed or (0.0, 0.0)
    return (
        f"{doc.percent(arm)} of the requests failed under {findings.arms[found.arm]} and {doc.percent(base)} "
        f"under {findings.arms[0]}, so TTFT is not compared."
    )


def _promised(promises: Mapping[str | None, Slo]) -> str:
    """By class, where there are several; requests may bring others along."""
    parts = []
    for kind, slo in promises.items():
        between = within(BETWEEN_SHOWN[slo.between_kind], slo.between_tokens)
        limits = filter(None, (within("TTFT", slo.first_token), between))
        name = "" if len(promises) == 1 else f"{kind or 'others'}: "
        parts.append(name + (", ".join(limits) or "none"))
    return "; ".join(parts) or "none"


def _facts(outcome: Outcome) -> dict[str, str]:
    findings = outcome.findings
    arms, state = len(findings.arms), findings.state
    minutes = findings.minutes(findings.rounds)
    blocks = f"{findings.rounds} of {arms} blocks of {findings.block:g} s, {minutes:.0f} minutes"
    facts = {"rounds": f"{blocks}; the first {findings.burn:g} s of each block are left out"}
    if state is not None:
        facts["state"] = f"{state.name}, backlog {state.low:.1f} to {state.high:.1f} s"
    if outcome.stopped:
        facts["ended"] = outcome.stopped
    return facts


def _grid(findings: Findings, found: ArmFound, verdicts: Sequence[Verdict], title: str = "") -> doc.Grid:
    ordered = sorted(verdicts, key=lambda verdict: verdict.metric is not findings.primary)
    heads = ("figure", findings.arms[0], findings.arms[found.arm], "change", "interval", "word")
    return doc.Grid(title, heads, tuple(_row(findings, verdict) for verdict in ordered))


def _row(findings: Findings, verdict: Verdict) -> doc.Row:
    metric, change = verdict.metric, verdict.change
    if change is None:
        return doc.row(metric.title, *(doc.Cell("-"),) * 4, CANNOT_TELL)
    word = verdict.word
    if word == CANNOT_TELL and verdict.rounds_missing is not None:
        word += f", ~{ceil(findings.minutes(verdict.rounds_missing))} min more"
    tone = "words" if verdict.better is None else "words good" if verdict.better else "words bad"
    unit = " points" if metric.share else " %"
    return doc.row(
        metric.title,
        doc.valued(metric.shown(change.baseline), change.baseline),
        doc.valued(metric.shown(change.arm), change.arm),
        doc.valued(doc.signed(100 * change.value) + unit, 100 * change.value),
        doc.Cell(_ends(metric, change)),
        doc.Cell(word, tone=tone),
    )


def _charts(outcome: Outcome) -> Iterable[doc.Figure | str]:
    findings = outcome.findings
    metrics = dict.fromkeys(verdict.metric for found in findings.found for verdict in found.verdicts)
    for metric in metrics:
        rows = by_round(outcome.book, findings.arms, metric)
        if all(figure is None for row in rows for figure in row):
            continue
        scale, unit = (1.0, "/s") if metric is THROUGHPUT else (1000.0, "ms")
        scale, unit = (100.0, "%") if metric.share else (scale, unit)
        rounds = np.arange(1.0, len(rows) + 1)
        series = []
        for place, name in enumerate(findings.arms):
            values = scale * np.array([row[place] for row in rows], float)  # None becomes not a number
            series.append(Series(name, rounds, values, colour=place, shape="linked"))
        chart = Chart(Axis("round", whole=True), Axis(metric.title, unit), series)
        look = "Each point is a block after its burn-in; arms of one round met much the same traffic."
        yield chart.figure(metric.title, look)


# -- figures as people read them


def _interval(metric: Metric, change: Change) -> str:
    unit = "points" if metric.share else "%"
    ends = _ends(metric, change)
    return f"the change {ends}" if ends == UNBOUNDED else f"interval {ends} {unit}"


def _ends(metric: Metric, change: Change) -> str:
    """A relative change is never below -100 %: an end there says no more than an infinite one."""
    low, high = 100 * change.low, 100 * change.high
    from_below = isfinite(low) and (metric.share or low > -99.95)  # as shown
    if not isfinite(high):
        return f"{doc.signed(low)} or more" if from_below else UNBOUNDED
    return f"{doc.signed(low)} to {doc.signed(high)}" if from_below else f"{doc.signed(high)} or less"
