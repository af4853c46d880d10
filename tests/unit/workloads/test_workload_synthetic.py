"""Arrival processes, length laws, and workloads drawn from them."""

import gzip
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.request import Slo
from headgate.workloads import Kind, Share, Workload, arrival_process, generate, length_law
from headgate.workloads.arrivals import AllAtOnce, Constant, GammaArrivals, Poisson
from headgate.workloads.lengths import Empirical, Fixed, Gamma, Geometric, LogNormal, Pairs, Uniform
from headgate.workloads.streams import stream
from headgate.workloads.synthetic import WorkloadStage

MANY = 40_000
CHAT, BULK = Kind("chat", Slo(1.0), 0), Kind("bulk", Slo(), 5)
LAWS = [
    Fixed(40),
    Uniform(40),
    Uniform(40, spread=1.0),
    Geometric(40),
    Gamma(40, shape=0.5),
    Gamma(40, shape=4),
    LogNormal(40, sigma=0.8),
    Empirical([20, 60]),
]
ARRIVALS = [Poisson(8.0), GammaArrivals(8.0, 0.25), GammaArrivals(8.0, 4.0), Constant(8.0)]


def draw(law, count=MANY, seed=1):
    return law.draw(count, stream(seed, "test"))


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_lengths_have_the_mean_asked_for(law):
    lengths = draw(law)
    assert lengths.dtype == np.int64 and lengths.min() >= 1
    # Five standard errors, so that only a wrong law fails.
    assert lengths.mean() == pytest.approx(40, abs=5 * lengths.std() / math.sqrt(MANY) + 0.01)


@pytest.mark.parametrize(
    ("law", "deviation"),
    [
        (Uniform(1000), 500 / math.sqrt(3)),
        (Uniform(1000, spread=0.25), 250 / math.sqrt(3)),
        (Geometric(1000), math.sqrt(1000 * 999)),
        (Gamma(1000, shape=4), 500),
        (Gamma(1000), 1000 / math.sqrt(2)),
        (LogNormal(1000, sigma=0.5), 1000 * math.sqrt(math.exp(0.25) - 1)),
    ],
    ids=repr,
)
def test_lengths_have_the_spread_of_their_law(law, deviation):
    assert draw(law).std() == pytest.approx(deviation, rel=0.03)


def test_fixed_is_fixed():
    assert draw(Fixed(7), 3).tolist() == [7, 7, 7]


def test_uniform_has_the_published_range():
    lengths = draw(Uniform(512))
    assert (lengths.min(), lengths.max()) == (256, 768)
    assert draw(Uniform(1), 10).tolist() == [1] * 10
    assert sorted(set(draw(Uniform(3, spread=1.0), 1000).tolist())) == [1, 2, 3, 4, 5]


def test_geometric_has_constant_hazard():
    lengths = draw(Geometric(4))
    hazards = [(lengths == age).sum() / (lengths >= age).sum() for age in (1, 2, 5)]
    assert hazards == pytest.approx([0.25] * 3, abs=0.02)


@pytest.mark.parametrize(
    ("law", "lift"),
    [(Gamma(1, 1), 0.353), (Gamma(10, 1), 0.0045), (LogNormal(1, 1), 0.369), (LogNormal(2, 1), 0.087)],
    ids=repr,
)
def test_tiny_means_are_lifted_as_the_docstrings_say(law, lift):
    lengths = draw(law, 400_000)
    assert lengths.mean() / law.mean - 1 == pytest.approx(lift, abs=5 * lengths.std() / law.mean / 632)


@given(st.floats(1, 3000), st.integers(0, 100))
def test_every_law_draws_lengths(mean, seed):
    for law in (Uniform(mean), Geometric(mean), Gamma(mean, 0.1), LogNormal(mean, 3.0)):
        lengths = draw(law, 20, seed)
        assert len(lengths) == 20 and lengths.dtype == np.int64 and (lengths >= 1).all()


def test_absurd_draws_stay_lengths():
    assert draw(LogNormal(2e9, sigma=3.0), 1000).max() <= 2**31 - 1
    assert draw(Geometric(2e9), 1000).max() <= 2**31 - 1


def test_empirical_draws_only_what_was_seen():
    assert set(draw(Empirical([5, 5, 5, 90])).tolist()) == {5, 90}
    assert np.mean(draw(Empirical([5, 5, 5, 90])) == 5) == pytest.approx(0.75, abs=0.02)


def test_pairs_stay_together():
    prompts, outputs = draw(Pairs([1, 2, 3], [10, 20, 30]))
    assert np.array_equal(outputs, prompts * 10) and set(prompts.tolist()) == {1, 2, 3}


@pytest.mark.parametrize("process", ARRIVALS, ids=repr)
def test_arrivals_are_sorted_and_have_their_rate(process):
    times = draw(process)
    assert (np.diff(times) >= 0).all() and times[0] > 0
    assert MANY / times[-1] == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize(
    ("process", "variation"),
    [(Poisson(8.0), 1.0), (GammaArrivals(8.0), 1.0), (GammaArrivals(8.0, 0.25), 2.0), (Constant(8.0), 0.0)],
    ids=repr,
)
def test_gaps_vary_as_their_law_says(process, variation):
    gaps = np.diff(draw(process))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.06)


def test_known_arrivals():
    assert Constant(4.0).draw(3, stream(0, "x")).tolist() == [0.25, 0.5, 0.75]
    assert AllAtOnce().draw(2, stream(0, "x")).tolist() == [0.0, 0.0]


def test_names_give_laws():
    assert length_law("fixed", 8) == Fixed(8)
    assert length_law("uniform", 8, spread=0.25) == Uniform(8, 0.25)
    assert length_law("geometric", 8) == Geometric(8)
    assert length_law("gamma", 8, shape="3") == Gamma(8, 3.0)
    assert length_law("lognormal", 8) == LogNormal(8, 1.0)
    assert arrival_process("poisson", 2) == Poisson(2)
    assert arrival_process("gamma", 2, 0.5) == GammaArrivals(2, 0.5)
    assert arrival_process("gamma", 2) == GammaArrivals(2, 1.0)
    assert arrival_process("constant", 2) == Constant(2)
    assert arrival_process("all-at-once") == AllAtOnce()


def test_lengths_from_a_file(tmp_path):
    plain, table, packed = tmp_path / "a.txt", tmp_path / "b.csv", tmp_path / "c.gz"
    plain.write_text("3\n5\n\n5\n")
    table.write_text("id,prompt,output\n0,7,1\n1,9,2.0\n")
    packed.write_bytes(gzip.compress(b"tokens\n4\n"))
    assert length_law(f"lengths={plain}").values.tolist() == [3, 5, 5]
    assert length_law(f"lengths={table}", column="output").values.tolist() == [1, 2]
    assert length_law(f"lengths={packed}").values.tolist() == [4]


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        ("3\nx\n", None, r"f\.csv:2: the length is 'x', not a number; fix the line"),
        ("3\n0\n", None, r"f\.csv:2: the length is 0, not a length from 1"),
        ("3\n2.5\n", None, r"f\.csv:2: the length is 2.5, not a whole number"),
        ("a,b\n1\n", "b", r"f\.csv:2: the length is missing"),
        ("a,b\n1,2\n", None, r"f\.csv: several columns; name one of: a, b"),
        ("a,b\n1,2\n", "c", r"f\.csv: no column 'c'; name one of: a, b"),
        ("a\n", None, "no lengths in it; give one per line"),
        ("", None, r"f\.csv: the file is empty"),
    ],
)
def test_bad_length_files(tmp_path, content, column, message):
    path = tmp_path / "f.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        length_law(f"lengths={path}", column=column)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(0), "mean of a length law is 0; give a number of tokens from 1"),
        (lambda: Fixed(2.5), "a fixed length of 2.5 tokens is not whole; round it"),
        (lambda: Uniform(0.5), "mean of a length law is 0.5"),
        (lambda: Uniform(8, 1.5), "spread of a length law is 1.5; give a number from 0 to 1"),
        (lambda: Uniform(2.5, 0.1), "no whole number lies within 0.1 of 2.5; use a wider spread"),
        (lambda: Geometric(math.nan), "mean of a length law is nan"),
        (lambda: Geometric(math.inf), "mean of a length law is inf"),
        (lambda: Gamma(8, 0), "shape of a length law is 0; give a number above 0"),
        (lambda: Gamma(8, math.nan), "shape of a length law is nan"),
        (lambda: LogNormal(8, -1), "sigma of a length law is -1"),
        (lambda: Empirical([]), "an empirical law of no lengths"),
        (lambda: Empirical([3, 0]), "length at row 1 is 0"),
        (lambda: Pairs([1, 2], [1]), "2 prompts and 1 outputs make no pairs"),
        (lambda: Pairs([], []), "0 prompts and 0 outputs make no pairs"),
        (lambda: Poisson(0), "rate of arrivals is 0; give a number above 0"),
        (lambda: Poisson(math.nan), "rate of arrivals is nan"),
        (lambda: Constant(-1), "rate of arrivals is -1"),
        (lambda: Constant(math.inf), "rate of arrivals is inf"),
        (lambda: GammaArrivals(1, 0), "burstiness of arrivals is 0"),
        (lambda: length_law("unifor", 8), "unknown length law 'unifor'; did you mean 'uniform'"),
        (lambda: length_law("zipf", 8), "unknown length law 'zipf'; choose from: fixed, gamma"),
        (lambda: length_law("gamma"), "lengths 'gamma' need a mean; give it in tokens"),
        (
            lambda: length_law("gamma", 8, shap=2),
            "unknown parameter of lengths 'gamma' 'shap'; did you mean 'shape'",
        ),
        (lambda: length_law("fixed", 8, shape=2), "lengths 'fixed' have no 'shape'; only a mean"),
        (lambda: length_law("gamma", 8, shape="x"), "shape of a length law is 'x'; give a number"),
        (lambda: length_law("lengths=f", 8), "'lengths=f' has its own mean; drop the mean"),
        (lambda: length_law("lengths=no-such-file"), "no-such-file: no such file; check the path"),
        (lambda: arrival_process("posson", 1), "unknown arrival process 'posson'; did you mean 'poisson'"),
        (lambda: arrival_process("poisson"), "arrivals 'poisson' need a rate"),
        (lambda: arrival_process("poisson", 1, 2), "arrivals 'poisson' have no burstiness"),
        (lambda: arrival_process("all-at-once", 1), "arrivals 'all-at-once' have no rate"),
    ],
)
def test_bad_laws_are_one_line(make, message):
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def base(**changes):
    return generate(
        **{
            "requests": 50,
            "seed": 3,
            "arrivals": Poisson(2),
            "prompt": Uniform(64),
            "output": Geometric(9),
            **changes,
        }
    )


def same(one, other):
    """Which of the drawn columns are equal."""
    return {
        name
        for name in ("arrival", "prompt", "output", "kind")
        if np.array_equal(one.columns()[name], other.columns()[name])
    }


def test_same_arguments_same_requests():
    assert base() == base()
    assert same(base(), base(seed=4)) == {"kind"}


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"prompt": LogNormal(900)}, {"arrival", "output", "kind"}),
        ({"output": Fixed(3)}, {"arrival", "prompt", "kind"}),
        ({"arrivals": Constant(9)}, {"prompt", "output", "kind"}),
        ({"arrivals": None, "clients": 8}, {"prompt", "output", "kind"}),
    ],
    ids=["prompt", "output", "arrivals", "clients"],
)
def test_changing_one_law_leaves_the_others_draws(change, kept):
    assert same(base(), base(**change)) == kept


def test_more_requests_begin_with_the_same_ones():
    assert base(requests=80).head(50) == base()


def test_all_at_once_unless_told_otherwise():
    assert not base(arrivals=None).arrival.any() and not base(arrivals=None).closed


def test_closed_loop():
    closed = base(arrivals=None, clients=8)
    assert closed.closed and set(closed.clients.tolist()) == {8}


def test_pairs_are_drawn_together():
    trace = Workload.of([1, 2, 3], [10, 20, 30])
    drawn = base(prompt=None, output=None, pairs=Pairs(trace.prompt, trace.output))
    assert np.array_equal(drawn.output, drawn.prompt * 10)
    assert same(drawn, base()) == {"arrival", "kind"}


def mix(chat=None, **changes):
    classes = [
        Share(3, CHAT, chat or Fixed(10), Uniform(9)),
        Share(1, BULK, Geometric(50), Fixed(4), patience=2.0),
    ]
    return generate(**{"requests": 8000, "seed": 1, "classes": classes, **changes})


def test_a_mix_of_classes():
    drawn = mix()
    bulk = drawn.kind == 1
    assert drawn.kinds == (CHAT, BULK)
    assert bulk.mean() == pytest.approx(0.25, abs=0.025)
    assert set(drawn.prompt[~bulk].tolist()) == {10} and set(drawn.output[bulk].tolist()) == {4}
    assert drawn.prompt[bulk].mean() == pytest.approx(50, rel=0.1)
    assert set(drawn.patience[bulk].tolist()) == {2.0} and np.isinf(drawn.patience[~bulk]).all()
    assert set(drawn.priority[bulk].tolist()) == {5}


def test_changing_one_class_leaves_the_other():
    one, other = mix(), mix(chat=Gamma(500))
    bulk = one.kind == 1
    assert same(one, other) == {"arrival", "output", "kind"}
    assert np.array_equal(one.prompt[bulk], other.prompt[bulk])


def test_nothing_shares_a_stream():
    # The same law everywhere: equal draws could only come from a shared stream.
    alike = base(
        prompt=Uniform(5000),
        output=Uniform(5000),
        requests=None,
        stages=[WorkloadStage(25), WorkloadStage(25)],
    )
    parts = [alike.prompt[:25], alike.prompt[25:], alike.output[:25], alike.output[25:]]
    classes = [Share(1, CHAT, Uniform(5000), Uniform(5000)), Share(1, BULK, Uniform(5000), Uniform(5000))]
    mixed = generate(100, seed=3, classes=classes)
    for kind in (0, 1):
        parts += [mixed.prompt[mixed.kind == kind][:25], mixed.output[mixed.kind == kind][:25]]
    assert len({tuple(part) for part in parts}) == len(parts)


def test_stages_change_rate_and_lengths():
    drawn = base(
        requests=None,
        arrivals=Constant(1),
        stages=[
            WorkloadStage(10),
            WorkloadStage(20, rate=4),
            WorkloadStage(5, prompt=Fixed(7)),
            WorkloadStage(5, output=Fixed(3)),
        ],
    )
    gaps = np.diff(drawn.arrival, prepend=0.0)
    assert gaps.tolist() == pytest.approx([1.0] * 10 + [0.25] * 20 + [1.0] * 10)
    assert drawn.prompt[30:35].tolist() == [7] * 5 and drawn.output[35:].tolist() == [3] * 5
    assert drawn.prompt[:30].std() > 0 and drawn.head(10).prompt.tolist() == base().head(10).prompt.tolist()


def test_stages_change_the_clients():
    drawn = base(
        requests=6,
        arrivals=None,
        clients=4,
        stages=[WorkloadStage(2, clients=32), WorkloadStage(1), WorkloadStage(3, clients=8)],
    )
    assert drawn.clients.tolist() == [32, 32, 4, 8, 8, 8]


def test_stage_rates_without_a_process_are_poisson():
    assert same(base(arrivals=None, requests=None, stages=[WorkloadStage(50, rate=2)]), base()) == {
        "arrival",
        "prompt",
        "output",
        "kind",
    }


def test_changing_one_stage_leaves_the_next():
    one = base(requests=None, stages=[WorkloadStage(10), WorkloadStage(10)])
    other = base(requests=None, stages=[WorkloadStage(10, prompt=Gamma(9)), WorkloadStage(10)])
    assert np.array_equal(one.prompt[10:], other.prompt[10:]) and not np.array_equal(one.prompt, other.prompt)


def test_origin_says_how_it_was_made():
    origin = mix(stages=[WorkloadStage(8000, rate=2)], arrivals=GammaArrivals(1, 0.5)).origin
    text = json.dumps(origin)
    assert json.loads(text) == origin
    assert origin["drawn"]["arrivals"] == {"law": "GammaArrivals", "rate": 1, "burstiness": 0.5}
    assert origin["drawn"]["seed"] == 1 and origin["drawn"]["stages"] == [{"requests": 8000, "rate": 2}]
    assert origin["drawn"]["classes"][1]["prompt"] == {"law": "Geometric", "mean": 50}
    seen = base(prompt=Empirical([2, 4])).origin["drawn"]["prompt"]
    assert seen == {"law": "Empirical", "values": {"values": 2, "mean": 3.0}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": None}, "number of requests is missing"),
        ({"requests": 0}, "^0 requests; give at least 1"),
        ({"stages": [WorkloadStage(10)]}, "50 requests, but the stages have 10; make them agree"),
        ({"prompt": None}, "lengths are missing; give a prompt law and an output law"),
        ({"pairs": Pairs([1], [1])}, "lengths come from laws, from pairs or from classes; give only one"),
        ({"clients": 4}, "an arrival process in a closed loop; drop the arrivals or the clients"),
        ({"arrivals": None, "clients": 0}, "stage 0 has 0 clients; give at least 1"),
        ({"stages": [WorkloadStage(50, rate=0)]}, "rate of arrivals is 0"),
        (
            {"arrivals": AllAtOnce(), "stages": [WorkloadStage(50, rate=2)]},
            "stage 0 has a rate, the arrivals have none",
        ),
        (
            {"arrivals": None, "clients": 4, "stages": [WorkloadStage(50, rate=2)]},
            "stage 0 has a rate in a closed loop",
        ),
        (
            {"arrivals": None, "stages": [WorkloadStage(25), WorkloadStage(25, clients=2)]},
            "open and closed loop in one class",
        ),
        (
            {"prompt": None, "output": None, "classes": [Share(0, CHAT, Fixed(1), Fixed(1))]},
            "share of kind 'chat' is 0; give a number above 0",
        ),
        (
            {
                "prompt": None,
                "output": None,
                "classes": [Share(1, CHAT, Fixed(1), Fixed(1))],
                "stages": [WorkloadStage(50, prompt=Fixed(2))],
            },
            "stage 0 changes lengths that come from classes or pairs; give laws instead",
        ),
    ],
)
def test_bad_recipes_are_one_line(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        base(**changes)
    assert "\n" not in str(caught.value)


@given(
    st.integers(1, 200),
    st.integers(0, 10),
    st.sampled_from([*ARRIVALS, AllAtOnce()]),
    st.sampled_from(LAWS),
    st.sampled_from(LAWS),
)
def test_every_drawn_workload_is_sorted_and_reproducible(requests, seed, arrivals, prompt, output):
    make = lambda: generate(requests, seed=seed, arrivals=arrivals, prompt=prompt, output=output)  # noqa: E731
    assert make() == make()
    assert len(make()) == requests and (np.diff(make().arrival) >= 0).all()
