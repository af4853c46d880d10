from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest
from some_runs import empty_run, long_run, served

from headgate.report.charts import changes, distribution, over_time
from headgate.report.runs.timeline import timeline


def test_columns_hold_the_mean_over_time_and_the_extremes():
    start, seconds, value = np.array([0.0, 1.0, 3.0]), np.array([1.0, 1.0, 1.0]), np.array([2.0, 4.0, 6.0])
    found = over_time(start, seconds, value, np.array([0.0, 2.0, 4.0]))
    assert found.mean.tolist() == [3.0, 3.0]  # the second is idle half of the time
    assert found.high.tolist() == [4.0, 6.0] and found.low.tolist() == [2.0, 3.0]


def test_columns_conserve_the_whole():
    rng = np.random.default_rng(1)
    seconds = rng.uniform(0.01, 0.1, 500)
    start = np.cumsum(seconds + rng.uniform(0, 0.05, 500)) - seconds
    value = rng.uniform(0, 9, 500)
    edges = np.linspace(0, start[-1] + seconds[-1], 38)
    found = over_time(start, seconds, value, edges)
    assert float(found.mean @ np.diff(edges)) == pytest.approx(float(value @ seconds))


def test_a_distribution_has_the_quantiles_of_the_tables():
    values = np.random.default_rng(0).lognormal(size=2000)
    found, shares = distribution(values)
    for share in (0.5, 0.9, 0.99):
        assert found[np.argmin(np.abs(shares - share))] == pytest.approx(np.quantile(values, share))
    assert np.all(np.diff(found) >= 0) and len(found) < 120
    assert all(len(part) == 0 for part in distribution(np.empty(0)))


def test_changes_keep_extremes_and_drop_repeats():
    time = np.arange(10_000.0)
    value = np.zeros(10_000)
    value[5_000] = 7.0
    x, y = changes(time, value, 100)
    assert y.max() == 7.0 and len(x) <= 4
    noisy = np.random.default_rng(0).normal(size=10_000)
    x, y = changes(time, noisy, 100)
    assert len(x) <= 101 and y.max() == noisy.max() and y.min() == noisy.min()


def unpacked(run: dict, line: dict) -> dict[str, np.ndarray]:
    """As timeline.js reads it."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(run["data"])), np.uint8).reshape(6, 4, run["rows"])
    slots, queue, kv, idle, seconds, phase = (
        column.T.copy().view("<i4").ravel().astype(float) for column in raw
    )
    ends = np.cumsum(idle + seconds)
    found = {
        "start": line["low"] + (ends - seconds) * line["tick"],
        "seconds": seconds * line["tick"],
        "phase": phase,
    }
    return found | {
        "slots": np.cumsum(slots),
        "queue": np.cumsum(queue),
        "kv": np.cumsum(kv) * line["kv_tick"],
    }


def test_the_timeline_carries_every_step():
    run = served("eb")
    line = timeline([("eb", run)]).data["timeline"]
    found = unpacked(line["runs"][0], line)
    assert found["start"] == pytest.approx(run.steps["start"], abs=2e-5)
    assert found["seconds"] == pytest.approx(run.steps["seconds"], abs=2e-5)
    assert found["kv"] == pytest.approx(run.steps["kv"], abs=line["kv_tick"])
    assert set(found["phase"]) == {0.0, 1.0}  # exclusive batches never mix
    assert found["slots"].max() <= 32 and found["queue"].min() >= 0


def test_a_long_run_is_drawn_by_stretches_with_the_same_time_in_each_phase():
    run = long_run(20_000)
    line = timeline([("long", run)], rows=6000).data["timeline"]
    found = unpacked(line["runs"][0], line)
    assert len(found["start"]) <= 6000
    prefill = float(run.steps["seconds"][run.steps["prefill"] > 0].sum())
    assert found["seconds"][found["phase"] == 0].sum() == pytest.approx(prefill, rel=1e-3)


def test_a_fleet_is_drawn_engine_by_engine_and_nothing_as_nothing():
    figure = timeline([("fleet", long_run(100, replicas=20))])
    assert [run["name"] for run in figure.data["timeline"]["runs"]] == [
        f"fleet, engine {n}" for n in range(8)
    ]
    assert timeline([("none", empty_run())]) is None
