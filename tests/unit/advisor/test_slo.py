"""Service levels: what may be written, what is refused, what a run is measured by; the search for a rate."""

from __future__ import annotations

from math import exp, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.advisor.capacity.search import Search
from headgate.advisor.capacity.traffic import Level, measure, parse_levels, promise
from headgate.core.errors import InputError, RunError
from headgate.core.request import Slo
from headgate.experiment.library import simulate
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Kind, Workload
from worlds import Line


def test_levels_as_written():
    found = parse_levels(
        ["ttft=500ms@p50,tbt=100ms@p99:paying", "tbt=0.5s:free", "e2e=1min@max,tpot=50ms@mean"]
    )
    assert found == (
        Level("ttft", 0.5, "p50"),
        Level("tbt", 0.1, "p99", "paying"),
        Level("tbt", 0.5, "", "free"),
        Level("e2e", 60.0, "max"),
        Level("tpot", 0.05, "mean"),
    )
    assert str(found[1]) == "p99 TBT of paying <= 100 ms"
    assert str(found[2]) == "TBT of free <= 500 ms"
    assert str(found[3]) == "max E2E <= 60 s"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not a service level; write METRIC=TIME@STATISTIC:CLASS"),
        ("ttft", "'ttft' is not a service level"),
        ("tfft=1s@p50", "unknown metric in --slo 'tfft'; did you mean 'ttft'?"),
        ("ttft=fast@p50", "'fast' is not a duration; write 500ms"),
        ("ttft=0@p50", "a limit must be above 0"),
        ("ttft=-1@p50", "is not a duration"),
        ("ttft=1s@50", "'50' is no statistic; write p50, p99, p99.9, mean or max"),
        ("ttft=1s@p100", "'p100' is no statistic"),
        ("ttft=1s@p0", "'p0' is no statistic"),
        ("ttft=1s@p", "'p' is no statistic"),
        ("ttft=1s@pnan", "'pnan' is no statistic"),
        ("ttft=1s@", "ends too early"),
        ("ttft=1s@p50:", "ends too early"),
        ("ttft=1s@p50,ttft=2s@p50", "the same level is given twice"),
        ("ttft=1s@p50,", "'' is not a service level"),
        ("ttft=1s,tbt=1s:free", "--slo names no level to keep"),
        (
            "envelope=50ms@p95",
            "the envelope begins where the first token is due; promise that too, such as ttft",
        ),
        ("ttft=1s:paying,envelope=50ms@p95:free", "such as ttft=500ms@p95:free"),
    ],
)
def test_bad_levels_get_one_line(text, says):
    with pytest.raises(InputError) as caught:
        parse_levels([text])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_promises_are_the_tightest_levels():
    levels = parse_levels(["ttft=2s@p50,ttft=1s@p99,tbt=100ms:paying,tbt=500ms"])
    assert promise(levels, "paying", Slo()) == Slo(1.0, 0.1)
    assert promise(levels, "free", Slo()) == Slo(1.0, 0.5)
    assert promise(parse_levels(["e2e=1s@p50"]), "free", Slo(3.0, None)) == Slo(3.0, None)


def test_a_promise_is_of_the_kind_of_its_level():
    levels = parse_levels(["ttft=1s@p95,envelope=50ms@p95:chat,gap=80ms@p95:code,tpot=20ms@p95:batch"])
    kinds = [promise(levels, name, Slo()) for name in ("chat", "code", "batch", "others")]
    assert kinds == [Slo(1.0, 0.05, "envelope"), Slo(1.0, 0.08), Slo(1.0, 0.02, "mean"), Slo(1.0)]
    assert [str(level) for level in levels[1:3]] == [
        "p95 envelope of chat <= 50 ms",
        "p95 gap of code <= 80 ms",
    ]
    same = parse_levels(["ttft=1s@p95,tpot=50ms@p95,tbt=50ms@p99"])
    assert promise(same, "", Slo()) == Slo(1.0, 0.05)  # of equal numbers every gap is the harder promise


def two_kinds() -> tuple[Workload, Engine]:
    kinds = (Kind("paying"), Kind("free"))
    workload = Workload.of([10] * 60, [3, 5] * 30, arrival=np.arange(60) * 9.0, kind=[0, 1] * 30, kinds=kinds)
    return workload, Engine(Line(), 10_000, 1000, 64, 8)


def test_measured_against_the_tables():
    workload, engine = two_kinds()
    run = simulate(engine, Mixed(8, 64), workload)
    rows, middle = run.requests, slice(6, 54)
    ttft = (rows["first_token"] - rows["arrival"])[middle]
    whole = (rows["finished"] - rows["arrival"])[middle][1::2]  # free ones
    tpot = ((rows["finished"] - rows["first_token"]) / (rows["output"] - 1))[middle][0::2]
    levels = parse_levels(["ttft=1s@p50,e2e=100s@p90:free,tpot=1h@mean:paying,ttft=9s@max,tbt=2s"])
    kept = measure(run, levels)
    wanted = (np.median(ttft), np.quantile(whole, 0.9), np.mean(tpot), ttft.max())
    assert kept.values == pytest.approx(wanted)
    assert kept.worst == levels[0]
    assert kept.ratio == pytest.approx(np.median(ttft) / 1.0)


def test_gaps_by_class():
    workload, engine = two_kinds()
    run = simulate(engine, Mixed(8, 64), workload)
    # A request alone takes 1 + 0.05 + 0.001 (10 + i) for its i-th gap; the paying have two, the free four.
    paying, free = (
        measure(run, parse_levels([f"tbt=1s@max:{kind}"])).values[0] for kind in ("paying", "free")
    )
    assert (paying, free) == pytest.approx((1.062, 1.064))
    assert measure(run, parse_levels(["tbt=1s@mean:paying"])).values[0] == pytest.approx((1.061 + 1.062) / 2)


def test_who_never_got_a_token_is_infinitely_late():
    workload, engine = two_kinds()
    run = simulate(engine, Mixed(8, 64), workload)
    rows = {name: column.copy() for name, column in run.requests.items()}
    rows["first_token"][10:30] = np.nan
    cut = type(run)(run.meta, rows, run.steps, run.stays, run.plans)
    values = measure(cut, parse_levels(["ttft=1s@p50,ttft=1s@p90"])).values
    assert values[0] < 2
    assert values[1] == inf


def test_outputs_of_one_token_are_never_late_between_tokens():
    workload, engine = two_kinds()
    short = Workload.of(workload.prompt, np.ones(60), arrival=workload.arrival)
    kept = measure(simulate(engine, Mixed(8, 64), short), parse_levels(["tbt=1ms@p99,tpot=1ms@p99"]))
    assert kept.values == (0.0, 0.0)


def test_a_class_nobody_measured():
    workload, engine = two_kinds()
    run = simulate(engine, Mixed(8, 64), workload)
    with pytest.raises(RunError, match="no request of class 'gold' was measured; ask for more --requests"):
        measure(run, parse_levels(["ttft=1s@p50:gold"]))


# -- the search ---------------------------------------------------------------------------------------


def sought(ratio, top: float, precision: float = 0.02) -> Search:
    search = Search(top, precision)
    while (rate := search.next()) is not None:
        assert 0 < rate <= top
        assert rate not in search.tried
        search.tell(rate, ratio(rate))
    return search


@given(st.floats(0.2, 9.9), st.floats(0.3, 5.0))
def test_a_crossing_is_found(crossing, steepness):
    search = sought(lambda rate: exp(steepness * (rate - crossing)), 10.0)
    assert search.answer == pytest.approx(crossing, rel=1e-6)
    assert len(search.tried) <= 20


@given(st.floats(0.2, 9.9))
def test_a_cliff_is_found_within_the_precision(cliff):
    search = sought(lambda rate: 0.5 if rate <= cliff else inf, 10.0)
    assert search.sustained <= cliff < search.missed
    assert search.answer == pytest.approx(cliff, rel=0.02)


def test_nothing_and_everything():
    nothing, everything = sought(lambda rate: 2.0, 10.0), sought(lambda rate: 0.1, 10.0)
    assert nothing.answer == 0
    assert len(nothing.tried) <= 8
    assert everything.answer == 10.0
    assert everything.missed > 10.0


def test_noise_does_not_make_it_endless():
    flips = iter([0.9, 1.1] * 20)
    search = sought(lambda rate: next(flips), 10.0, precision=1e-9)
    assert len(search.tried) <= 20
    assert search.sustained < search.missed
