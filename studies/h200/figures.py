"""From rows and tokens to the figures of one run."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.cost.model import Shape
from headgate.sim.engine.engine import Engine
from studies.h200.loads import Load
from studies.h200.record import Record, Row

Numbers = npt.NDArray[np.float64]


def figures(record: Record, load: Load, engine: Engine, begin: float, end: float) -> dict[str, Any]:
    """Everything about the steps whose tokens came after `begin` and not after `end`."""
    rows = [row for row in record.rows if begin < row.ended <= end]
    table = np.array(rows, dtype=float).reshape(-1, len(Row._fields))
    column = {name: table[:, place] for place, name in enumerate(Row._fields)}
    seconds = float(column["ended"][-1]) - begin if rows else 0.0
    return {
        "seconds": seconds,
        **_throughput(record, load, engine, begin, end, seconds),
        **_latency(record, begin, end),
        "steps": _kinds(column),
        "decodes_mean": _mean(column["decodes"][column["decodes"] > 0]),
        "kv_mean": _mean(column["kv"]),
        "kv_max": float(column["kv"].max(initial=0.0)),
        "prefilled_tokens": int(column["prefill"].sum()),
        "preemptions": int(column["preempted"].sum()),
        "scheduling_mean": _mean(column["scheduling"]),
        "gauges": _gauges(record, begin, end),
    }


def _throughput(
    record: Record, load: Load, engine: Engine, begin: float, end: float, seconds: float
) -> dict[str, float]:
    """Prompts count when they are done, so that computing one again after a preemption counts for nothing."""
    prompt = float(record.prompt[(record.first > begin) & (record.first <= end)].sum())
    output = float(sum(len(each.ids) for each in record.tokens if begin < each.time <= end))
    share = prompt_share(load, engine)
    served = share * prompt / load.prompt + (1 - share) * output / load.output
    return {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "balanced_requests_per_s": served / seconds if seconds else 0.0,
        "tokens_per_s": (prompt + output) / seconds if seconds else 0.0,
    }


def prompt_share(load: Load, engine: Engine) -> float:
    """Which share of the time of an average request its prompt takes, by the card.

    A window cuts through requests, and through the refills of an exclusive policy. What was done in it is
    counted in average requests, prompt and output tokens each by their share of the cost, so that a window
    that saw one prompt more and some output less counts the same.
    """
    slots, budget = engine.running, engine.batch_tokens
    prompt = load.prompt * engine.cost.seconds(Shape(prefill=budget)) / budget
    context = round(slots * (load.prompt + load.output / 2))
    output = load.output * engine.cost.seconds(Shape(decodes=slots, context=context)) / slots
    return prompt / (prompt + output)


def _latency(record: Record, begin: float, end: float) -> dict[str, float]:
    """First tokens, gaps, and the mean gap of each request (of at least two), all within the window."""
    chosen = [each for each in record.tokens if begin < each.time <= end]
    ids = np.concatenate([each.ids for each in chosen]) if chosen else np.zeros(0, np.int32)
    gaps = np.concatenate([each.gaps for each in chosen]) if chosen else np.zeros(0, np.float32)
    later = ~np.isnan(gaps)
    gaps, ids = gaps[later].astype(float), ids[later]
    count = np.bincount(ids)
    per_request = np.bincount(ids, gaps)[count > 0] / count[count > 0]
    first = (record.first > begin) & (record.first <= end)
    wait = record.first[first] - record.arrival[first]
    return {
        "ttft_mean": _mean(wait),
        "ttft_p50": _quantile(wait, 0.5),
        "ttft_p99": _quantile(wait, 0.99),
        "tpot_mean": _mean(per_request),
        "tpot_p99": _quantile(per_request, 0.99),
        "itl_p99": _quantile(gaps, 0.99),
        "worst_gap": float(gaps.max(initial=0.0)),
    }


def _kinds(column: dict[str, Numbers]) -> dict[str, int]:
    decodes, prefill = column["decodes"] > 0, column["prefill"] > 0
    return {
        "mixed": int(np.sum(decodes & prefill)),
        "decode": int(np.sum(decodes & ~prefill)),
        "prefill": int(np.sum(~decodes & prefill)),
        "empty": int(np.sum(~decodes & ~prefill)),
    }


def _gauges(record: Record, begin: float, end: float) -> dict[str, dict[str, float]]:
    """Mean and last value of what the policy said of itself."""
    said = [values for time, values in record.gauges if begin < time <= end]
    return {
        name: {"mean": _mean(np.array([float(each[name]) for each in said])), "last": float(said[-1][name])}
        for name in (said[-1] if said else {})
    }


def _mean(values: Numbers) -> float:
    return float(values.mean()) if len(values) else 0.0


def _quantile(values: Numbers, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else 0.0
