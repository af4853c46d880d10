"""What a trial found: each arm beside the baseline, overall and by class, in figures and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from headgate.live.trial.book import Book, measured
from headgate.stats.switchback import (
    ALLOWED,
    BINS,
    CANNOT_TELL,
    FAILURES,
    KEPT,
    SAME,
    TTFT,
    TTFT_P95,
    Looks,
    Metric,
    State,
    Sums,
    Verdict,
    judge_metric,
    middle_of,
    quantile,
)

BACKEND = "headgate-trial"
MILLISECONDS = 1000.0
MORE_DIGITS = 6


@dataclass(frozen=True)
class ArmFound:
    """One arm beside the baseline; only figures that the state of the server allows."""

    arm: int
    verdicts: tuple[Verdict, ...]
    by_class: dict[str, tuple[Verdict, ...]] = field(default_factory=dict)
    failed: tuple[float, float] | None = None  # shares of baseline and arm, where TTFT is left out for them

    def verdict(self, metric: Metric) -> Verdict | None:
        return next((each for each in self.verdicts if each.metric is metric), None)


@dataclass(frozen=True)
class Findings:
    """Of all rounds whose requests have ended."""

    arms: tuple[str, ...]
    primary: Metric
    rounds: int
    block: float
    burn: float
    state: State | None  # None before the first round
    found: tuple[ArmFound, ...]
    requests: tuple[int, ...]  # by arm: that were judged
    failed: tuple[int, ...]  # of those

    @property
    def told(self) -> bool:
        """Whether the primary figure of every arm has an answer that is not "same"."""
        verdicts = [each.verdict(self.primary) for each in self.found]
        return bool(verdicts) and all(v is not None and v.word not in (SAME, CANNOT_TELL) for v in verdicts)

    def minutes(self, rounds: int) -> float:
        return rounds * len(self.arms) * self.block / 60


def judge(
    book: Book,
    arms: Sequence[str],
    primary: Metric,
    block: float,
    burn: float,
    looks: Looks,
    ended: bool = False,
) -> Findings:
    """`ended`: this is the planned end; before it, intervals hold at any look."""
    rounds = book.complete_rounds(len(arms))
    state = book.state(rounds) if rounds else None
    allowed = ALLOWED[state.name] if state is not None else ()
    if not book.promises:
        allowed = tuple(metric for metric in allowed if metric is not KEPT)
    levels = (looks.at_the_end, None) if ended else (looks.on_the_way, looks.later)

    def verdicts(arm: int, metrics: Sequence[Metric], kind: str | None = None) -> tuple[Verdict, ...]:
        pairs = [(blocks[0].sums(kind), blocks[arm].sums(kind)) for blocks in rounds]
        return tuple(judge_metric(metric, pairs, *levels) for metric in metrics)

    sums = [[blocks[arm].sums() for blocks in rounds] for arm in range(len(arms))]
    requests = tuple(round(sum(one.requests for one in mine)) for mine in sums)
    failed = tuple(round(sum(one.failed for one in mine)) for mine in sums)
    shares = [lost / max(count, 1) for lost, count in zip(failed, requests, strict=True)]
    classes = [kind for kind in book.classes() if len(book.classes()) > 1]
    found = []
    for arm in range(1, len(arms)):
        apart = (shares[0], shares[arm]) if abs(shares[arm] - shares[0]) > FAILURES else None
        fair = [each for each in allowed if apart is None or each not in (TTFT, TTFT_P95)]
        by_class = {kind: verdicts(arm, fair, kind) for kind in classes}
        found.append(ArmFound(arm, verdicts(arm, fair), by_class, apart))
    return Findings(
        arms=tuple(arms),
        primary=primary,
        rounds=len(rounds),
        block=block,
        burn=burn,
        state=state,
        found=tuple(found),
        requests=requests,
        failed=failed,
    )


# -- as JSON


def as_json(findings: Findings) -> dict[str, Any]:
    """All of it. Shares are from 0 to 1, times in seconds, changes of anything else relative."""
    state = findings.state
    return {
        "arms": list(findings.arms),
        "baseline": findings.arms[0],
        "primary": findings.primary.name,
        "requests": dict(zip(findings.arms, findings.requests, strict=True)),
        "failed": dict(zip(findings.arms, findings.failed, strict=True)),
        "rounds": findings.rounds,
        "block_seconds": findings.block,
        "burn_in_seconds": findings.burn,
        "state": None if state is None else state.name,
        "backlog_seconds": None if state is None else [_known(state.low), _known(state.high)],
        "found": {
            findings.arms[each.arm]: {
                "all": _verdicts(findings, each.verdicts),
                "classes": {kind: _verdicts(findings, one) for kind, one in each.by_class.items()},
            }
            for each in findings.found
        },
    }


def _verdicts(findings: Findings, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    rows = {}
    for verdict in verdicts:
        change, missing = verdict.change, verdict.rounds_missing
        rows[verdict.metric.name] = {
            "word": verdict.word,
            "better": verdict.better,
            "unit": "share" if verdict.metric.share else "relative",
            "baseline": None if change is None else _known(change.baseline),
            "arm": None if change is None else _known(change.arm),
            "change": None if change is None else _known(change.value),
            "low": None if change is None else _known(change.low),
            "high": None if change is None else _known(change.high),
            "more_minutes": None if missing is None else _known(findings.minutes(missing)),
        }
    return rows


def _known(value: float | None) -> float | None:
    return round(value, MORE_DIGITS) if value is not None and isfinite(value) else None


def by_round(book: Book, arms: Sequence[str], metric: Metric) -> list[list[float | None]]:
    """A figure of each arm in each complete round."""
    rows: list[list[float | None]] = []
    for blocks in book.complete_rounds(len(arms)):
        rows.append([_figure(metric, block.sums()) for block in blocks])
    return rows


def _figure(metric: Metric, sums: Sums) -> float | None:
    if metric.quantile:
        bins = getattr(sums, metric.top)
        return quantile(bins, metric.quantile) if bins.sum() else None
    under = getattr(sums, metric.under)
    return getattr(sums, metric.top) / under if under else None


# -- in the words of `vllm bench serve --save-result`


def bench_result(
    book: Book, arm: int, name: str, model: str, date: str, rate: float | None
) -> dict[str, Any]:
    """One arm's blocks after their burn-in, as that tool would have measured them (latencies in ms).

    Gaps are from histograms of 1 %; the two peaks are not known.
    """
    blocks = [block for block in book.blocks if block.arm == arm]
    records, seconds = measured(blocks)
    done = [record for record in records if record.complete]
    tokens_in, tokens_out = (sum(getattr(r, what) for r in done) for what in ("prompt", "output"))
    result: dict[str, Any] = {
        "date": date,
        "endpoint_type": BACKEND,
        "backend": BACKEND,
        "label": name,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(records),
        "request_rate": rate or "inf",
        "duration": seconds,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": _per(len(done), seconds),
        "request_goodput": _per(sum(r.kept for r in records), seconds) if book.promises else None,
        "output_throughput": _per(tokens_out, seconds),
        "total_token_throughput": _per(tokens_in + tokens_out, seconds),
    }
    result |= _latencies("ttft", [r.ttft for r in done if r.ttft is not None])
    result |= _latencies("tpot", [r.tpot for r in done if r.tpot is not None])
    result |= _latencies("e2el", [r.seconds for r in done])
    gaps = sum((block.sums().gap_bins for block in blocks), np.zeros(BINS))
    result |= _latencies("itl", middle_of(np.arange(float(BINS))), gaps)
    return result


def _per(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _latencies(name: str, values: Any, weights: Any = None) -> dict[str, float | None]:
    """Mean, median, spread and percentiles, in ms."""
    values = np.asarray(values, np.float64)
    weights = np.ones(len(values)) if weights is None else weights
    fields = ("mean", "median", "std", "p90", "p95", "p99")
    if not weights.sum():
        return {f"{which}_{name}_ms": None for which in fields}
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    sorted_values = values[order]

    def at(share: float) -> float:
        return float(sorted_values[int(np.searchsorted(reached, share - 1e-12))])

    mean = float(np.average(values, weights=weights))
    spread = float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))
    numbers = (mean, at(0.5), spread, at(0.9), at(0.95), at(0.99))
    return {f"{which}_{name}_ms": value * MILLISECONDS for which, value in zip(fields, numbers, strict=True)}
