"""What is printed and written is right: strict JSON, units, recomputed by hand, the same for one seed."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from headgate.record.tables import Run

LOAD = ["--requests", 120, "--slots", 16, "--clients", 24, "--prompt", 200, "--output", 40]


def strict(text):
    return json.loads(text, parse_constant=pytest.fail)


@pytest.fixture
def simulated(headgate):
    said = headgate(
        "simulate", *LOAD, "--ttft", "500ms", "--tpot", "20ms", "--out", "r", "--json", "-", "--detailed"
    )
    assert said.code == 0
    return strict(said.out)


def test_bench_json_by_hand(simulated, tmp_path):
    table = np.load(tmp_path / "r" / "requests.npz")
    bench = strict((tmp_path / "r" / "bench.json").read_text())
    arrival, first, finished = table["arrival"], table["first_token"], table["finished"]
    output, duration = table["output"], finished.max() - arrival.min()
    tpot = (finished - first) / (output - 1)
    by_hand = {
        "completed": 120,
        "failed": 0,
        "num_prompts": 120,
        "duration": duration,
        "total_input_tokens": table["prompt"].sum(),
        "total_output_tokens": output.sum(),
        "request_throughput": 120 / duration,
        "output_throughput": output.sum() / duration,
        "total_token_throughput": (output.sum() + table["prompt"].sum()) / duration,
        "request_goodput": np.sum((first - arrival <= 0.5) & (tpot <= 0.02)) / duration,
        "mean_ttft_ms": np.mean(first - arrival) * 1e3,
        "p99_ttft_ms": np.percentile(first - arrival, 99) * 1e3,
        "median_tpot_ms": np.median(tpot) * 1e3,
        "std_tpot_ms": np.std(tpot) * 1e3,
        "mean_e2el_ms": np.mean(finished - arrival) * 1e3,
        "mean_itl_ms": np.sum(finished - first) / np.sum(output - 1) * 1e3,
    }
    for name, value in by_hand.items():
        assert bench[name] == pytest.approx(value, rel=1e-9), name
        assert simulated[name] == bench[name]
    assert bench["max_concurrency"] == 24 and bench["request_rate"] == "inf"


def test_peaks_by_hand(simulated):
    tokens: dict[int, int] = {}
    there: dict[int, int] = {}
    for sent, ttft, gaps in zip(*(simulated[name] for name in ("start_times", "ttfts", "itls")), strict=True):
        moments = sent + ttft + np.concatenate(([0.0], np.cumsum(gaps)))
        for moment in moments:
            tokens[int(moment + 1e-9)] = tokens.get(int(moment + 1e-9), 0) + 1
        for second in range(int(sent), int(moments[-1]) + 1):
            there[second] = there.get(second, 0) + 1
    assert simulated["max_output_tokens_per_s"] == pytest.approx(max(tokens.values()), abs=16)
    assert simulated["max_concurrent_requests"] == max(there.values())


def test_detailed_lists_agree_with_the_figures(simulated):
    assert np.mean(simulated["ttfts"]) * 1e3 == pytest.approx(simulated["mean_ttft_ms"])
    gaps = np.concatenate([np.array(gaps) for gaps in simulated["itls"]])
    assert gaps.mean() * 1e3 == pytest.approx(simulated["mean_itl_ms"], rel=1e-6)
    assert [len(gaps) + 1 for gaps in simulated["itls"]] == simulated["output_lens"]
    assert simulated["headgate"]["longest_gap"] <= gaps.max() + 1e-12


def test_same_seed_same_result_other_seed_other(headgate):
    def run(seed):
        said = headgate("simulate", *LOAD, "--seed", seed, "--json", "-")
        return {name: value for name, value in strict(said.out).items() if name != "date"}

    assert run(1) == run(1)
    assert run(1)["mean_ttft_ms"] != run(2)["mean_ttft_ms"]


def test_compare_and_simulate_agree(headgate, tmp_path):
    pair = ["--policy", "mixed", "--policy", "eb:refill=4"]
    said = headgate("compare", *LOAD, *pair, "--out", "c", "--json", "-")
    assert said.code == 0 and "run folders: c" in said.err
    rows = {row["metric"]: row for row in strict(said.out)["rows"]}
    for name, folder in (("mixed", "mixed"), ("eb:refill=4", "eb-refill=4")):
        alone = strict(headgate("simulate", *LOAD, "--policy", name, "--json", "-").out)
        bench = strict((tmp_path / "c" / folder / "bench.json").read_text())
        assert {**alone, "label": 0, "date": 0} == {
            **bench,
            "label": 0,
            "date": 0,
            "headgate": alone["headgate"],
        }
        for metric, value in (
            ("mean TTFT", alone["headgate"]["ttft"]["mean"]["value"]),
            ("request throughput", alone["headgate"]["request_rate"]["value"]),
        ):
            row = rows[metric]
            found = row["baseline"]["value"] if name == "mixed" else row["others"][name]["value"]
            assert found == pytest.approx(value)


def test_a_common_setting_reaches_the_policies_that_have_it(headgate, tmp_path):
    (tmp_path / "c.toml").write_text("policies=['mixed','eb']\n[set]\nrefill=3\n")
    assert headgate("compare", "c.toml", *LOAD, "--out", "c").code == 0
    assert Run.load(tmp_path / "c" / "eb").meta["parameters"]["refill"] == 3
    assert "refill" not in Run.load(tmp_path / "c" / "mixed").meta["parameters"]


def test_seeds_are_paired(headgate, tmp_path):
    said = headgate(
        "compare", *LOAD, "--policy", "mixed", "--policy", "v0", "--seeds", 3, "--out", "c", "--json", "-"
    )
    found = strict(said.out)
    assert found["seeds"] == 3 and {row["method"] for row in found["rows"]} == {"by seed"}
    names = sorted(path.name for path in (tmp_path / "c").iterdir() if path.is_dir())
    assert names == [f"{policy}-seed{seed}" for policy in ("mixed", "v0") for seed in range(3)]


def test_long_names_cut_no_number(headgate):
    long = "eb-online:window=100,warm=10,review=11,prior=300.0"
    said = headgate("compare", *LOAD, "--policy", "mixed", "--policy", long)
    assert said.code == 0 and "…" not in said.out.split("difference, %")[0]


@pytest.mark.parametrize("columns", ["20", "40", "200"])
def test_a_narrow_terminal_cuts_no_number(headgate, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    said = headgate("simulate", *LOAD)
    assert said.code == 0 and "…" not in said.out


def test_numbers_of_run_folders_grow(headgate, tmp_path):
    for _ in range(3):
        assert headgate("simulate", "--requests", 5).code == 0
    numbers = sorted(int(path.name[:4]) for path in (tmp_path / "runs").iterdir())
    assert all(later == sooner + 1 for sooner, later in pairwise(numbers)) and numbers == [1, 2, 3]
