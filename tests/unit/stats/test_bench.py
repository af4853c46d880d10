from __future__ import annotations

import json
import math

import numpy as np
import pytest

from headgate.stats.vllm_bench import bench_result
from small_runs import make_run, naive_run, open_run, request


def three():
    """Prompt by 0.5, tokens at 1.0 and 2.5; the second was evicted; the third gave up."""
    requests = [
        request(0, 0.0, 0.0, 0.5, 2.5, 10, 3),
        request(1, 0.25, 0.5, 1.0, 2.5, 20, 2),
        request(2, 1.0, math.nan, math.nan, 1.5, 5, 0, "abandoned"),
    ]
    steps = [
        {"start": 0.0, "count": 1, "first": 0.5, "seconds": 0.5, "prefill": 10},
        {"start": 0.5, "count": 1, "first": 0.5, "seconds": 0.5, "decodes": 1, "prefill": 20},
        {"start": 2.0, "count": 1, "first": 0.5, "seconds": 0.5, "decodes": 1, "prefill": 21},
    ]
    stays = [
        {"request": 0, "opened": 0.5, "gap": math.nan, "first_tick": 0, "ticks": 2},
        {"request": 1, "opened": 1.0, "gap": math.nan, "first_tick": 1, "ticks": 0},
        {"request": 1, "opened": 2.5, "gap": 1.5, "first_tick": 2, "ticks": 0},
    ]
    kinds = [{"name": "", "first_token": 0.6, "between_tokens": None}]
    return make_run(requests, steps, stays, rate=2.0, model="tiny", label="x", date="20260101", kinds=kinds)


def test_every_number_by_hand():
    found = bench_result(three())
    expected = {
        "backend": "headgate-sim", "endpoint_type": "headgate-sim", "model_id": "tiny",
        "tokenizer_id": "tiny",
        "label": "x", "date": "20260101", "num_prompts": 3, "request_rate": 2.0, "burstiness": 1.0,
        "max_concurrency": None, "duration": 2.5, "completed": 2, "failed": 1, "total_input_tokens": 30,
        "total_output_tokens": 5, "request_throughput": 0.8, "request_goodput": 0.4, "output_throughput": 2.0,
        "total_token_throughput": 14.0, "max_output_tokens_per_s": 2.0, "max_concurrent_requests": 3,
        "mean_ttft_ms": 625.0, "median_ttft_ms": 625.0, "std_ttft_ms": 125.0,
        "mean_tpot_ms": 1250.0, "mean_e2el_ms": 2375.0, "p99_e2el_ms": 2250 + 0.99 * 250,
        "mean_itl_ms": 3500 / 3, "median_itl_ms": 1500.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    for latency in ("ttft", "tpot", "itl", "e2el"):
        for which in ("mean", "median", "std", "p90", "p95", "p99"):
            assert isinstance(found[f"{which}_{latency}_ms"], float)
    assert "itls" not in found


def test_detailed_lists_by_hand():
    found = bench_result(three(), detailed=True)
    assert found["input_lens"] == [10, 20, 5]
    assert found["output_lens"] == [3, 2, 0]
    assert found["ttfts"] == [0.5, 0.75, None]
    assert found["itls"] == [[0.5, 1.5], [1.5], []]
    assert found["start_times"] == [0.0, 0.25, 1.0]
    assert found["generated_texts"] == ["", "", ""]
    assert found["errors"] == ["", "", "abandoned"]


def test_unfinished_requests_failed():
    run = three()
    run.requests["how"][0], run.requests["finished"][0] = -1, math.nan
    found = bench_result(run, detailed=True)
    assert found["errors"] == ["unfinished", "", "abandoned"]
    assert (found["completed"], found["failed"]) == (1, 2)


def test_strict_json_even_of_nothing():
    for run in (make_run(), make_run([request(0, 0, 0, math.nan, math.nan, 1, 0, "")]), three()):
        json.dumps(bench_result(run, detailed=True), allow_nan=False)
    assert bench_result(make_run())["request_throughput"] is None
    assert bench_result(make_run())["request_goodput"] is None
    assert bench_result(make_run(clients=4))["request_rate"] == "inf"
    assert bench_result(make_run(clients=4))["max_concurrency"] == 4


def test_fields_agree_with_each_other():
    found = bench_result(open_run(200), detailed=True)
    gaps = np.concatenate(found["itls"])
    assert found["mean_itl_ms"] == pytest.approx(1000 * gaps.mean())
    assert found["p99_itl_ms"] == pytest.approx(1000 * np.quantile(gaps, 0.99))
    assert found["total_output_tokens"] == len(gaps) + found["completed"]


@pytest.mark.parametrize("seed", range(5))
def test_the_busiest_second_is_that_of_the_tokens(seed):
    run, tokens = naive_run(seed, rows=200, replicas=2, requests=4)
    seconds = np.floor(np.concatenate(list(tokens.values())))
    assert bench_result(run)["max_output_tokens_per_s"] == np.unique(seconds, return_counts=True)[1].max()
