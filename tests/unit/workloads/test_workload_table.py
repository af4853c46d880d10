"""The table of requests: checks, subsets, scaling, merging, closed loops, summary."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.request import Slo
from headgate.workloads import Kind, Workload
from headgate.workloads.workload import LONGEST

CHAT = Kind("chat", Slo(1.0, 0.05), 0)
BULK = Kind("bulk", Slo(), 5)


@st.composite
def workloads(draw, most=30):
    rows = draw(st.integers(1, most))
    numbers = st.lists(st.integers(1, 5000), min_size=rows, max_size=rows)
    gaps = draw(st.lists(st.floats(0, 100), min_size=rows, max_size=rows))
    kinds = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    return Workload.of(draw(numbers), draw(numbers), arrival=np.cumsum(gaps), kind=kinds, kinds=(CHAT, BULK))


def three(**columns):
    return Workload.of([10, 20, 30], [1, 2, 3], **{"arrival": [0.0, 1.0, 3.0], **columns})


def test_defaults():
    table = Workload.of([10, 20], [1, 2])
    assert table.arrival.tolist() == [0.0, 0.0] and table.arrival.dtype == np.float64
    assert table.kind.tolist() == [0, 0] and table.kinds == (Kind(),)
    assert table.limit.tolist() == [LONGEST, LONGEST]
    assert table.priority.tolist() == [0, 0]
    assert np.isinf(table.patience).all() and np.isinf(table.abort).all()
    assert table.guess.tolist() == [-1, -1] and table.clients.tolist() == [0, 0]
    assert all(table.columns()[name].dtype == np.int64 for name in ("prompt", "output", "limit", "clients"))
    assert len(table) == 2 and not table.closed


def test_priority_follows_the_kind_unless_given():
    assert three(kind=[0, 1, 1], kinds=(CHAT, BULK)).priority.tolist() == [0, 5, 5]
    assert three(kind=[0, 1, 1], kinds=(CHAT, BULK), priority=[3, 2, 1]).priority.tolist() == [3, 2, 1]


def test_one_value_stands_for_all_rows():
    assert three(patience=2.5, limit=7).patience.tolist() == [2.5] * 3
    assert three(limit=7).limit.tolist() == [7] * 3


def test_columns_are_copies_that_cannot_be_written():
    lengths = np.array([10, 20])
    table = Workload.of(lengths, lengths)
    lengths[0] = 99
    assert table.prompt.tolist() == [10, 20]
    with pytest.raises(ValueError, match="read-only"):
        table.prompt[0] = 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": [1, 0, 1]}, "prompt at row 1 is 0; lengths are whole numbers from 1"),
        ({"output": [1, 1, -4]}, "output at row 2 is -4; lengths are"),
        ({"prompt": [1, 2.5, 1]}, "prompt at row 1 is 2.5; lengths are whole"),
        ({"prompt": [1, float("nan"), 1]}, "prompt at row 1 is nan"),
        ({"prompt": [1, 2**31, 1]}, "prompt at row 1 is 2147483648"),
        ({"prompt": [1, 10**30, 1]}, "prompt at row 1 is 10+;"),
        ({"prompt": ["a", "b", "c"]}, "prompt holds something that is not a number"),
        ({"prompt": [[1, 2, 3]]}, "prompt has 2 dimensions; give one value per request"),
        ({"arrival": [0, -1, 2]}, "arrival at row 1 is -1; times are seconds of at least 0"),
        ({"arrival": [0, 1, float("nan")]}, "arrival at row 2 is nan"),
        ({"arrival": [0, 1, float("inf")]}, "arrival at row 2 is inf"),
        ({"arrival": [0, 2, 1]}, "arrival at row 2 is 1.0, before the row above it; sort the requests"),
        ({"patience": [1, -1, 1]}, "patience at row 1 is -1"),
        ({"abort": [1, 1, float("nan")]}, "abort at row 2 is nan"),
        ({"guess": [1, -2, 1]}, "guess at row 1 is -2; a guess is a length, or -1 for none"),
        ({"limit": [1, 1, 0]}, "limit at row 2 is 0"),
        ({"clients": [1, 1, -1]}, "clients at row 2 is -1"),
        ({"kind": [0, 1, 0]}, "kind at row 1 is 1; there are only 1 kinds"),
        ({"kind": [0, -1, 0]}, "kind at row 1 is -1"),
        ({"output": [1, 2]}, "output has 2 rows, prompt has 3; give one value per request"),
        ({"arrival": [0, 0]}, "arrival has 2 rows, prompt has 3"),
        ({"prompt": [], "output": []}, "a workload has no requests; give at least one"),
        ({"clients": [4, 4, 0]}, "clients at row 2 is 0, at row 0 4: open and closed loop in one"),
        ({"clients": 4, "arrival": [0, 0, 1]}, "arrival at row 2 is 1.0 in a closed loop; drop the arrivals"),
        ({"kinds": (CHAT, Kind("chat"))}, "2 kinds are called 'chat'; give each its own name"),
        ({"colour": [1, 2, 3]}, "a workload has no column 'colour'; choose from: arrival, prompt"),
    ],
)
def test_every_wrong_table_is_one_line(columns, message):
    with pytest.raises(InputError, match=message) as caught:
        Workload.of(**{"prompt": [1, 2, 3], "output": [1, 2, 3], **columns})
    assert "\n" not in str(caught.value)


def test_equal_tables_hold_the_same_requests():
    assert three() == three(name="other", origin={"a": 1})
    assert three() != three(guess=[1, 2, 3])
    assert three() != three(kinds=(CHAT,))
    assert three() != "three"


def test_head_and_subset():
    assert three().head(2).prompt.tolist() == [10, 20]
    assert three().head(99) == three()
    assert three().subset(np.array([True, False, True])).arrival.tolist() == [0.0, 3.0]
    assert three().subset(slice(1, None)).output.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.head(0), "the first 0 requests of a workload are none"),
        (lambda table: table.subset(np.array([True])), "a mask needs one true or false for each of the 3"),
        (lambda table: table.subset(np.array([0, 1, 2])), "a mask needs one true or false"),
        (lambda table: table.subset(slice(0, 0)), "a workload has no requests"),
        (
            lambda table: table.between(5, 9),
            "no request arrives from 5 s to 9 s; the workload spans 0 s to 3 s",
        ),
        (lambda table: table.scale_rate(0), "the rate cannot be scaled by 0; give a number above 0"),
        (lambda table: table.scale_rate(float("nan")), "scaled by nan"),
        (lambda table: table.scale_rate(float("inf")), "scaled by inf"),
        (lambda table: table.cap(prompt=0), "prompt lengths cannot be capped at 0; give at least 1"),
        (lambda table: table.arriving([0, 1]), "arrival has 2 rows, prompt has 3"),
        (lambda table: table.as_closed(0), "a closed loop of 0 clients; give at least 1"),
        (
            lambda table: table.as_closed(2).scale_rate(2),
            "a closed loop has no arrival times, so no rate; choose its clients instead",
        ),
        (lambda table: table.as_closed(2).between(0, 1), "a closed loop has no arrival times"),
        (lambda table: table.merge(table.as_closed(2)), "open and closed loop in one class"),
        (lambda table: table.merge(three(kinds=(Kind("", Slo(1.0)),))), "2 kinds are called ''"),
    ],
)
def test_every_wrong_change_is_one_line(change, message):
    with pytest.raises(InputError, match=message) as caught:
        change(three())
    assert "\n" not in str(caught.value)


def test_between_moves_the_clock():
    part = three(patience=[1, 2, 3]).between(0.5, 3.0)
    assert part.arrival.tolist() == [0.5] and part.prompt.tolist() == [20] and part.patience.tolist() == [2]
    assert three().between(0.0, np.inf) == three()


def test_cap_cuts_lengths_and_guesses():
    capped = three(guess=[9, -1, 1]).cap(prompt=15, output=2)
    assert capped.prompt.tolist() == [10, 15, 15]
    assert capped.output.tolist() == [1, 2, 2]
    assert capped.guess.tolist() == [2, -1, 1]
    assert three().cap() == three()


@given(workloads(), st.floats(0.01, 100))
def test_scaling_the_rate_scales_time_and_nothing_else(table, factor):
    fast = table.scale_rate(factor)
    assert np.array_equal(fast.arrival, table.arrival / factor)
    assert fast.all_at_once() == table.all_at_once()


@given(workloads(), workloads(), workloads())
def test_merge_keeps_all_rows_in_order(one, two, three):
    merged = one.merge(two, three)
    rows = lambda table: zip(  # noqa: E731
        table.arrival, table.prompt, table.output, [table.kinds[kind] for kind in table.kind], strict=True
    )
    # Sorting in Python is stable, so ties must stand in the order of the arguments.
    assert list(rows(merged)) == sorted([*rows(one), *rows(two), *rows(three)], key=lambda row: row[0])


def test_merge_of_many_tenants_takes_no_time():
    names = [f"t{number}" for number in range(20_000)]
    many = Workload.of([10] * 20_000, [10] * 20_000, tenant=np.arange(20_000), tenants=names)
    begin = time.process_time()
    both = many.merge(many)
    assert time.process_time() - begin < 2.0  # a search for each name took 20 s
    assert both.tenants == tuple(names) and np.array_equal(both.tenant[20_000:], many.tenant)


def test_clients_beside_an_open_loop_have_no_first_requests():
    chat = Workload.of([5, 5], [1, 1], arrival=[0.5, 5.0], kinds=[CHAT])
    with pytest.raises(InputError, match="take the head of the open loop and merge the clients"):
        chat.merge(Workload.of([1] * 9, [2] * 9, clients=1, kinds=[BULK])).head(2)


@pytest.mark.parametrize("weight", [0.0, -1.0, 2e9, float("inf"), float("nan")])
def test_weights_that_mean_nothing(weight):
    with pytest.raises(
        InputError, match=r"kind 'gold' has weight .*; give (a number above 0|at most 1,000,000,000)"
    ):
        Workload.of([5], [1], kinds=[Kind("gold", Slo(weight=weight))])


def test_merge_maps_kinds():
    merged = three(kinds=(CHAT,), name="a").merge(three(kinds=(BULK, CHAT), kind=[0, 1, 0], name="b"))
    assert merged.kinds == (CHAT, BULK)
    assert merged.kind.tolist() == [0, 1, 0, 0, 0, 1]
    assert merged.priority.tolist() == [0, 5, 0, 0, 0, 5]
    assert merged.name == "a+b"


def test_closed_loop_of_one_size():
    closed = three().as_closed(4)
    assert closed.closed and closed.clients.tolist() == [4, 4, 4] and not closed.arrival.any()
    assert three().as_closed(np.int64(4)) == closed


def test_closed_loop_in_stages():
    closed = Workload.of([1] * 6, [1] * 6, clients=[32, 512, 512, 8, 8, 8])
    assert closed.merge(closed).clients.tolist() == [32, 512, 512, 8, 8, 8] * 2


def test_a_closed_loop_opens_again():
    assert three().as_closed(4).arriving([0.0, 1.0, 3.0]) == three()
    assert not three().as_closed(4).all_at_once().closed
