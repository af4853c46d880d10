"""A run in the words of `vllm bench serve --save-result`, so that tools made for those files can read it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headgate.record.tables import ENDS, Flags, Floats, Run
from headgate.stats.figures import Figures, figures
from headgate.stats.gaps import Gaps
from headgate.stats.measured import Latencies, Measured, speculates
from headgate.stats.metrics import without_nan

BACKEND = "headgate-sim"
MILLISECONDS = 1000.0


def bench_result(run: Run | Measured, detailed: bool = False) -> dict[str, Any]:
    """The whole run, nothing left out, with that tool's field names and units (latencies in ms).

    As there, latencies and token totals are those of the requests that were served to their end, and the
    two peaks are counted in whole seconds since the start: most tokens that came within one second, most
    requests that were in the system during some part of one second. With `detailed`, lists with one entry
    per request in the order they were sent, times in seconds. Unknown numbers are None.
    """
    measured = Measured.of(run)
    run, gaps, latencies, promises = measured.run, measured.gaps, measured.latencies, measured.promises
    requests, done, begin = run.requests, run.completed(), run.span()[0]
    duration = float(np.max(requests["finished"][done], initial=begin)) - begin
    prompts, outputs = int(requests["prompt"][done].sum()), int(requests["output"][done].sum())
    finished = np.where(np.isnan(requests["finished"]), run.span()[1], requests["finished"])
    came, gone = np.floor(requests["arrival"] - begin), np.floor(finished - begin) + 1
    present = _by_second([came, gone], [np.ones(len(came)), -np.ones(len(gone))])
    meta = run.meta
    about = {
        "date": meta.get("date"),
        "endpoint_type": BACKEND,
        "backend": BACKEND,
        "label": meta.get("label"),
        "model_id": meta.get("model"),
        "tokenizer_id": meta.get("tokenizer", meta.get("model")),
        "request_rate": meta.get("rate") or "inf",
        "burstiness": meta.get("burstiness", 1.0),
        "max_concurrency": meta.get("clients"),
    }
    kept = None if promises is None else float(promises.met.sum())
    result = totals(about, (len(done), int(done.sum())), (prompts, outputs), kept, duration)
    result["max_output_tokens_per_s"] = _most_tokens(run, gaps, begin)
    result["max_concurrent_requests"] = int(np.cumsum(present).max(initial=0))
    sample = gaps.sample(done)
    for name, values in (("ttft", latencies.ttft), ("tpot", latencies.tpot), ("e2el", latencies.e2e)):
        result |= latency(name, figures(values[done & ~np.isnan(values)]))
    result |= latency("itl", figures(sample.values, weights=sample.weights))
    plain: dict[str, Any] = without_nan(result)
    return plain | _lists(run, gaps, latencies, done) if detailed else plain


def totals(
    about: dict[str, Any],
    requests: tuple[int, int],
    tokens: tuple[int, int],
    kept: float | None,
    duration: float,
) -> dict[str, Any]:
    """`requests`: all, and those served to their end; `tokens`: theirs; `kept` is None without promises."""
    every, served = requests
    seconds = duration if duration > 0 else math.nan
    return {
        **about,
        "num_prompts": every,
        "duration": duration,
        "completed": served,
        "failed": every - served,
        "total_input_tokens": tokens[0],
        "total_output_tokens": tokens[1],
        "request_throughput": served / seconds,
        "request_goodput": None if kept is None else kept / seconds,
        "output_throughput": tokens[1] / seconds,
        "total_token_throughput": sum(tokens) / seconds,
    }


def latency(name: str, latency: Figures) -> dict[str, float]:
    values = {"mean": latency.mean.value, "median": latency.median, "std": latency.std}
    values |= {"p90": latency.p90, "p95": latency.p95, "p99": latency.p99}
    return {f"{which}_{name}_ms": value * MILLISECONDS for which, value in values.items()}


def _most_tokens(run: Run, gaps: Gaps, begin: float) -> float:
    """Most output tokens within one second of the clock; with speculation each delivery is an average one."""
    done, latencies = run.completed(), Latencies.of(run)
    burst = 1.0
    if speculates(run) and (deliveries := float(latencies.deliveries[done].sum())):
        burst = float(latencies.gaps[done].sum()) / deliveries
    first = run.requests["first_token"]
    opening = run.stays["opened"][~np.isnan(run.stays["gap"])]  # tokens that ended a prompt done again
    single = np.concatenate((first[~np.isnan(first)], opening))
    seconds, counts = [np.floor(single - begin)], [np.ones(len(single))]
    for ends, tokens in gaps.tokens():
        second = np.floor(ends - begin)
        edges = np.flatnonzero(np.diff(second, prepend=-1.0))  # where another second begins
        seconds.append(second[edges])
        counts.append(burst * np.add.reduceat(tokens.astype(np.float64), edges))
    return float(_by_second(seconds, counts).max(initial=0.0))


def _by_second(seconds: list[Floats], amounts: list[Floats]) -> Floats:
    """Sums of the amounts by second, in order; seconds in which nothing happens take no memory."""
    _, place = np.unique(np.concatenate(seconds), return_inverse=True)
    return np.asarray(np.bincount(place, np.concatenate(amounts)), np.float64)


def _lists(run: Run, gaps: Gaps, latencies: Latencies, done: Flags) -> dict[str, Any]:
    requests = run.requests
    endings = [end.value for end in ENDS] + ["unfinished"]  # code -1 is the last
    return {
        "input_lens": requests["prompt"].tolist(),
        "output_lens": requests["output"].tolist(),
        "ttfts": without_nan(latencies.ttft.tolist()),
        "itls": gaps.lists(),
        "start_times": requests["arrival"].tolist(),
        "generated_texts": [""] * len(done),
        "errors": ["" if ok else endings[how] for ok, how in zip(done, requests["how"], strict=True)],
    }
