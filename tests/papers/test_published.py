"""The published constants hang together."""

import math

import numpy as np
import pytest

from headgate_papers.eb.lengths import DATA_SETS
from headgate_papers.eb.published import (
    CHOICES,
    FIGURE5,
    GAMMA_SHIFT,
    H200,
    RTX,
    TABLE2,
    TABLE3,
    TABLE10,
    TABLE11,
    TABLE13,
    TABLE18,
)
from headgate_papers.eb.published_split import TABLE19, TABLE20, WAYS19, WAYS20, Scene
from headgate_papers.eb.split_runs import FIGURES, eb_counts


def test_spot_checks():
    assert TABLE2[RTX, "8B", "ShareGPT"] == (15.45, 17.07, 19.68)
    assert TABLE2[H200, "30B", "NuminaMath"] == (1.42, 1.83, 1.68)
    assert FIGURE5[RTX, "ShareGPT", "TPOT"] == (268.97, 93.68)
    assert TABLE3[H200, "c=512"]["tok/s"] == (27464, 27207, 27460)
    assert TABLE3[RTX, "clients shift"]["TPOT"] == (142.4, 51.6, 77.5)
    assert TABLE10[192] == (0.39, 0.20, 0.13, 0.60)
    assert TABLE11[56] == (6627, 5735, 5460, 4701)
    assert TABLE13["Gamma(2)"][6] == 4129
    assert TABLE18[5, 100] == (5.0, 6.2, 48.4)
    assert GAMMA_SHIFT == {1: 0.16, 2: 0.36}


def test_sizes():
    assert len(TABLE2) == 2 * 2 * 4
    assert len(TABLE3) == 2 * 5
    assert all(set(cell) == {"tok/s", "TTFT", "TPOT"} for cell in TABLE3.values())
    assert [len(row) for row in TABLE10.values()] == [4] * 6
    assert list(TABLE11) == list(range(8, 129, 8))
    assert [len(row) for row in TABLE13.values()] == [10, 10]
    assert len(CHOICES) == len(TABLE18) == 6


@pytest.mark.parametrize(
    ("gpu", "model", "mean"), [(RTX, "8B", 7.9), (RTX, "30B", 1.4), (H200, "8B", 1.5), (H200, "30B", -2.9)]
)
def test_table_2_gives_its_own_averages(gpu, model, mean):
    gains = [
        100 * (eb / v1 - 1) for (at, size, _), (_, v1, eb) in TABLE2.items() if (at, size) == (gpu, model)
    ]
    assert np.mean(gains) == pytest.approx(mean, abs=0.06)


def test_table_10_gives_its_own_means():
    means = [0.46, 0.40, 0.33, 0.33, 0.26, 0.23]
    assert [np.mean(row) for row in TABLE10.values()] == pytest.approx(means, abs=0.006)


def test_table_11_has_its_best_where_the_paper_says():
    columns = np.array(list(TABLE11.values()))
    assert [list(TABLE11)[row] for row in columns.argmax(axis=0)] == [56, 80, 72, 72]


def test_table_13_adaptive_is_98_percent_of_the_best():
    for row in TABLE13.values():
        assert row[-1] / max(row[:-1]) == pytest.approx(0.98, abs=0.005)


@pytest.mark.parametrize(
    ("name", "prompt", "output", "sd", "longest"),
    [
        ("ShareGPT", 105, 280, 153, 500),
        ("LongBench", 2492, 11, 4, 19),
        ("NuminaMath", 122, 1039, 228, 3149),
        ("WildChat", None, 310, 245, 1934),
    ],
)
def test_data_sets_have_the_published_moments(name, prompt, output, sd, longest):
    data, generator = DATA_SETS[name], np.random.default_rng(0)
    outputs = data.output.draw(4000, generator)
    assert outputs.mean() == pytest.approx(output, rel=0.005)
    assert outputs.std() == pytest.approx(sd, rel=0.01)
    assert outputs.max() <= longest
    if prompt is not None:
        assert data.prompt.draw(4000, generator).mean() == pytest.approx(prompt, rel=0.02)


def test_the_longest_sharegpt_prompt_is_the_published_one():
    prompts = DATA_SETS["ShareGPT"].prompt.draw(4000, np.random.default_rng(0))
    assert prompts.min() == 1
    assert math.isclose(prompts.max(), 20448, rel_tol=1e-3)


def test_tables_of_disaggregation():
    assert TABLE19[Scene(H200, 512, "512/256")]["tok/s"] == (45731, 45539, 39649)
    assert TABLE20[Scene(H200, 512, "balanced")]["TPOT"][:4] == (14.7, 14.9, 9.2, 17.3)
    assert TABLE20[Scene(RTX, 128, "prefill")]["TTFT"] == (0.185, 0.171, 4.385, 0.476, 0.482)
    assert len(TABLE19) == 2 * 3 and len(TABLE20) == 2 * 3 * 3
    for table, ways in ((TABLE19, WAYS19), (TABLE20, WAYS20)):
        assert all(len(numbers) == len(ways) for metrics in table.values() for numbers in metrics.values())
    gone = [scene.clients for scene, row in TABLE19.items() if math.isnan(row["tok/s"][2])]
    assert gone == [2048, 2048]


class AsPublished:
    """Outcomes that are the published numbers themselves."""

    def figure(self, key, name):
        _, scene, way = key
        metric = next(metric for metric, (figure, _) in FIGURES.items() if figure == name)
        return TABLE19[scene][metric][WAYS19.index(way)]


def test_small_published_differences_are_counted_apart_from_clear_ones():
    """EB+ against v1 in Table 19: 4 of 6 cells differ by more than 1 % in tokens per second, 2 by 3 %."""
    counts = eb_counts(AsPublished(), TABLE19, WAYS19)
    assert [(count.agree, count.of) for count in counts] == [(4, 4), (5, 5), (3, 3), (2, 2), (3, 3), (1, 1)]
    assert ["above 1 %" in count.what for count in counts] == [True] * 3 + [False] * 3
    assert all("above 3 %" in count.what for count in counts[3:])
