"""What a run comes to: promises kept, times to first token, gaps, throughput, step times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from studies.h200.promises.client import Answer
from studies.h200.promises.load import BATCH, CHAT

Line = dict[str, Any]
BINS = (256, 512, 1024, 2048, 4096, 8192, 16_384)  # tokens of a step with prompts


def summary(answers: Sequence[Answer], ttft: float, tbt: float, warm: float, seconds: float) -> Line:
    """Over the requests that came from the end of the warm-up to `seconds`.

    A request is kept when its first token came in time and none of its gaps was longer than promised; one
    that was not served to its end is not.
    """
    inside = [each for each in answers if warm <= each.arrival <= seconds]
    mine = [each for each in inside if each.kind in ("", CHAT)]
    batch = [each for each in inside if each.kind == BATCH]
    first = np.array([inf if each.first is None else each.first for each in mine])
    gaps = np.array([gap for each in mine for gap in each.gaps])
    worst = np.array([max(each.gaps, default=0.0) for each in mine])
    whole = np.array([each.whole for each in mine], bool)
    ended = [each.arrival + each.last for each in answers if each.whole and each.last is not None]
    kept = whole & (first <= ttft) & (worst <= tbt)
    return {
        "requests": len(mine),
        "kept": _mean(kept),
        "first_in_time": _mean(first <= ttft),
        "gaps_in_time": _mean(gaps <= tbt),
        "requests_with_gaps_in_time": _mean(worst <= tbt),
        "ttft": _quantiles(first),
        "tpot": _quantiles([_tpot(each) for each in mine if each.whole and len(each.tokens) > 1]),
        "gap": {**_quantiles(gaps), "worst": float(gaps.max()) if len(gaps) else None},
        "served_per_second": sum(warm <= end <= seconds for end in ended) / (seconds - warm),
        "unfinished": int((~whole).sum()),
        "without_a_token": int(np.isinf(first).sum()),
        "errors": sorted({each.status for each in mine if each.status not in (0, 200)}),
        **({"batch": _batch(batch)} if batch else {}),
        "tokens_per_second": _rates(answers, warm, seconds),
    }


def _tpot(answer: Answer) -> float:
    """Seconds a token after the first delivery; with drafts a delivery has several."""
    return sum(answer.gaps) / sum(answer.tokens[1:])


def by_class(answers: Sequence[Answer], promises: Mapping[str, tuple[float, float]], warm: float) -> Line:
    """Requests and the share kept of each class with a promise."""
    found: Line = {}
    for kind, (ttft, tbt) in promises.items():
        mine = [each for each in answers if each.kind == kind and each.arrival >= warm]
        kept = [
            each.whole and (each.first or inf) <= ttft and max(each.gaps, default=0.0) <= tbt for each in mine
        ]
        found[kind] = {"requests": len(mine), "kept": _mean(kept)}
    return found


def _rates(answers: Sequence[Answer], warm: float, seconds: float) -> Line:
    """Prompt tokens, counted with the first token, and output tokens a second of each class in the window."""
    totals: dict[str, float] = {}
    for each in answers:
        if each.first is None:
            continue
        moments = each.arrival + np.cumsum([each.first, *each.gaps])
        inside = (moments >= warm) & (moments <= seconds)
        count = int(np.array(each.tokens)[inside].sum()) + each.prompt * bool(inside[0])
        totals[each.kind or "all"] = totals.get(each.kind or "all", 0.0) + count / (seconds - warm)
    return {kind: round(value, 1) for kind, value in sorted(totals.items())}


def _batch(answers: Sequence[Answer]) -> Line:
    """What became of the requests without promises."""
    first = np.array([inf if each.first is None else each.first for each in answers])
    readings = sum(len(each.gaps) + (each.first is not None) for each in answers)
    return {
        "requests": len(answers),
        "ttft": _quantiles(first),
        "without_a_token": int(np.isinf(first).sum()),
        "unfinished": sum(not each.whole for each in answers),
        "readings_with_tokens": readings,
    }


def raw(answers: Sequence[Answer]) -> Line:
    """Arrival, first token, gaps and tokens of each request, for another look."""
    return {
        "arrival": [round(each.arrival, 4) for each in answers],
        "first": [None if each.first is None else round(each.first, 4) for each in answers],
        "worst_gap": [round(max(each.gaps, default=0.0), 4) for each in answers],
        "gaps": [len(each.gaps) for each in answers],
        "decoding": [round(sum(each.gaps), 4) for each in answers],
        "tokens": [sum(each.tokens) for each in answers],
        "whole": [int(each.whole) for each in answers],
        "class": [each.kind for each in answers],
    }


def steps(trace: Path, offset: int) -> tuple[Line, int]:
    """Median time of steps since `offset` of the trace, by what was in them; and where the trace ends now."""
    groups: dict[str, list[float]] = {}
    with trace.open("rb") as file:
        file.seek(offset)
        for row in file:
            if not row.endswith(b"\n"):
                break
            offset += len(row)
            if b'"event":"steps"' in row:
                step = json.loads(row)
                groups.setdefault(_bin(step), []).append(step["ends"][-1] - step["start"])
    medians = {name: [len(found), float(np.median(found))] for name, found in sorted(groups.items())}
    return medians, offset


def _bin(step: Line) -> str:
    if not step["prefill"]:
        return "decodes"
    tokens = step["decodes"] + step["prefill"]
    return f"prompts<={next((most for most in BINS if tokens <= most), 'more')}"


def _mean(flags: Any) -> float | None:
    return float(np.mean(flags)) if len(flags) else None


def _quantiles(values: Any) -> Line:
    if not len(values):
        return {"p50": None, "p95": None, "p99": None}
    found = np.quantile(values, [0.5, 0.95, 0.99], method="higher")
    return {
        name: None if value == inf else float(value)
        for name, value in zip(("p50", "p95", "p99"), found, strict=True)
    }
