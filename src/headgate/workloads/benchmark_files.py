"""Result files of benchmark tools as traces: when each request was sent, and how long it was.

Read: `vllm bench serve --save-result --save-detailed`, AIPerf's profile_export.jsonl, GuideLLM's JSON.
Requests that failed have no length and are bad rows. The layouts are those of vLLM 0.26, AIPerf's guide to
profile exports and GuideLLM 0.2 (start_time) and 0.4 on (request_start_time).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headgate.core.errors import InputError

VLLM, AIPERF, GUIDELLM = "vllm-bench", "aiperf", "guidellm"
STARTS = ("request_start_time", "start_time")  # of a request, by GuideLLM's releases
Triple = tuple[int, object, object, object]  # number, arrival in seconds or nanoseconds, prompt, output


def recognised(text: str) -> str | None:
    """Which of these tools wrote it; None: none of them."""
    first = text.lstrip()[:1]
    if first != "{":
        return None
    line = _table(_loaded(text.lstrip().split("\n", 1)[0]))
    if "request_start_ns" in _table(line.get("metadata")):  # a failed request has no metrics
        return AIPERF
    if not any(word in text for word in ('"input_lens"', '"request_throughput"', '"benchmarks"')):
        return None
    whole = _loaded(text) or line  # --append-result writes an object per line
    if not isinstance(whole, dict):
        return None
    if "input_lens" in whole or "request_throughput" in whole:
        return VLLM
    return GUIDELLM if isinstance(whole.get("benchmarks"), list) else None


def requests_of(path: str, text: str, name: str) -> Iterator[Triple]:
    """Every request of such a file, in the file's order."""
    if name == AIPERF:
        yield from _aiperf(text)
        return
    whole = _loaded(text)
    if not isinstance(whole, dict):
        raise InputError(f"{path}: not one JSON object; keep one result of {name} in the file")
    yield from (_vllm(path, whole) if name == VLLM else _guidellm(path, whole))


def _vllm(path: str, whole: Mapping[str, Any]) -> Iterator[Triple]:
    columns = [whole.get(name) for name in ("start_times", "input_lens", "output_lens")]
    if not all(isinstance(column, list) for column in columns) or len({len(c) for c in columns if c}) > 1:
        raise InputError(f"{path}: no start_times, input_lens and output_lens; run it with --save-detailed")
    for number, (start, prompt, output) in enumerate(zip(*columns, strict=True), 1):
        yield number, start, prompt, output


def _aiperf(text: str) -> Iterator[Triple]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        record = _table(_loaded(line))
        metrics = _table(record.get("metrics"))
        prompt, output = (
            _table(metrics.get(f"{which}_sequence_length")).get("value") for which in ("input", "output")
        )
        yield number, _table(record.get("metadata")).get("request_start_ns"), prompt, output


def _guidellm(path: str, whole: Mapping[str, Any]) -> Iterator[Triple]:
    runs = whole["benchmarks"]
    if len(runs) != 1:
        raise InputError(f"{path}: {len(runs)} benchmarks, at different loads; keep one of them in the file")
    run = _table(runs[0])
    done = _table(run.get("requests")).get("successful")
    if not isinstance(done, list):
        raise InputError(f"{path}: no benchmarks[0].requests.successful; write it with all requests")
    counted = _table(run.get("request_totals") or _table(run.get("metrics")).get("request_totals"))
    every = counted.get("successful")
    if isinstance(every, int) and every > len(done):
        raise InputError(
            f"{path}: a sample of {len(done)} of {every} requests, too few for their rate; run GuideLLM "
            "without sampling of requests"
        )
    for number, each in enumerate(map(_table, done), 1):
        start = next((each[name] for name in STARTS if name in each), None)
        yield number, start, each.get("prompt_tokens"), each.get("output_tokens")


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
