"""What classes are worth and what tenants got, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import tracemalloc

import numpy as np
import pytest

from headgate.report.runs.page import runs_page
from headgate.report.runs.scenes import gather
from headgate.stats.measured import Measured, weights
from headgate.stats.metrics import MOST, compute_tenants, summarise
from small_runs import make_run, request

KINDS = [
    {"name": "gold", "first_token": 1.5, "between_tokens": None, "weight": 10.0},
    {"name": "free", "first_token": 1.5, "between_tokens": None},
    {"name": "batch", "first_token": None, "between_tokens": None, "background": True},
]


def weighed():
    """Gold in time; free in time and late; free of priority 1 in time; batch, which was promised nothing."""
    requests = [
        request(0, 0, 0, 1, 4, 10, 4, kind=0),
        request(1, 0, 0, 1, 4, 10, 4, kind=1),
        request(2, 0, 0, 2, 4, 10, 4, kind=1),
        request(3, 0, 0, 1, 4, 10, 4, kind=1),
        request(4, 0, 0, 3, 4, 10, 4, kind=2, evictions=2),
    ]
    run = make_run(requests, kinds=KINDS, label="run")
    run.requests["priority"] = np.array([0, 0, 0, 1, 0])
    return run


def test_the_value_kept_and_what_a_class_is_worth():
    run = weighed()
    assert weights(run).tolist() == [10.0, 1.0, 1.0, 0.1, 1.0]
    found = summarise(run)
    assert found.value_kept == pytest.approx((10 + 1 + 0.1) / (10 + 1 + 1 + 0.1))
    gold, free, batch = (kind.standing for kind in found.kinds)
    assert (gold.weight, free.weight, batch.background, batch.evictions) == (10.0, None, True, 2)
    run.requests["priority"][:] = 0
    assert summarise(run).kinds[1].standing.weight == 1.0  # one priority is one weight
    assert batch.token_rate == pytest.approx(14 / 4)
    document = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert document["value_kept"] == found.value_kept and "tenants" not in document
    assert document["kinds"][2]["standing"]["evictions"] == 2


def test_nothing_new_is_said_where_no_class_has_a_weight():
    run = weighed()
    plain = make_run([], kinds=[{"name": name} for name in "abc"], label="run")
    plain = type(plain)(plain.meta, run.requests, run.steps, run.stays, run.plans)
    document = summarise(plain).as_dict()
    assert "value_kept" not in document and "standing" not in document["kinds"][0]


def two_tenants(**second):
    """Tenant a has a request that waits from 0 to 3 while its first is served; b waits from 0 to 6."""
    rows = [
        request(0, 0, 0, 1, 3, 10, 4),
        request(1, 0, 3, 4, 6, 10, 4),
        request(2, 0, 6, 7, 9, 100, 4, **second),
    ]
    run = make_run(rows, tenants=["a", "b"], label="run")
    run.requests["tenant"] = np.array([0, 0, 1])
    return run


def test_service_and_the_largest_difference_while_both_wait():
    found = compute_tenants(two_tenants(), Measured(two_tenants()).window, None)
    assert [(each.name, each.requests, each.service) for each in found.tenants] == [
        ("b", 1, 108),
        ("a", 2, 36),
    ]
    assert found.rest is None and math.isnan(found.tenants[0].kept)
    # until 3 both wait: a got its prompt at 1 and 4 outputs, twice each, by 3; from 3 on only b waits
    assert (found.apart, found.ahead, found.behind) == (pytest.approx(10 + 2 * 4), "a", "b")
    assert [each.contended for each in found.tenants] == [0.0, 1.0]


def test_tenants_that_never_wait_together_are_not_compared():
    run = two_tenants()
    run.requests["arrival"][2] = 3.0
    found = compute_tenants(run, Measured(run).window, None)
    assert math.isnan(found.apart) and found.ahead == ""
    assert json.dumps(summarise(run).as_dict(), allow_nan=False)


def test_many_tenants_are_a_dozen_and_the_rest():
    many = MOST + 5
    run = make_run([request(n, 0, n, n + 1, n + 2, 10 + n, 2) for n in range(many)], label="run")
    run.meta["tenants"] = [f"t{n}" for n in range(many)]
    run.requests["tenant"] = np.arange(many)
    found = summarise(run).tenants
    assert len(found.tenants) == MOST and found.tenants[0].name == f"t{many - 1}"
    assert (found.rest.name, found.rest.requests) == ("5 others", 5)
    assert found.rest.service == sum(10 + n + 4 for n in range(5))


def test_thousands_of_tenants_take_no_mask_each():
    many, requests = 2000, 20_000
    run = make_run([request(n, 0, n, n + 1, n + 2, 10, 2) for n in range(requests)], label="run")
    run.meta["tenants"] = [f"t{n}" for n in range(many)]
    run.requests["tenant"] = np.arange(requests) % many
    window = Measured(run).window
    tracemalloc.start()
    found = compute_tenants(run, window, None)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.rest.requests == requests - 10 * MOST
    assert most < 2000 * 20_000 / 2  # a mask of each tenant has a byte for each request


def test_a_report_shows_both():
    run = two_tenants()
    run.meta["kinds"] = [{"name": "chat", "first_token": 2.0, "between_tokens": None, "weight": 2.0}]
    chapter = runs_page(gather([run])).chapters[0]
    grids = {section.title: section.blocks for section in chapter.sections}
    (worth,) = grids["By class"][:1]
    assert worth.heads == ("class", "weight", "promises\nkept", "evictions", "tokens\nper s")
    assert worth.notes == (
        "Value kept: 33.3 % (the weights of kept promises over those of all promised requests).",
    )
    tenants = grids["By tenant"][0]
    assert [cell.text for cell in tenants.rows[0]] == ["b", "1", "108.0", "0.0 %", "0.0 %"]
    assert "while both waited: a got 18.00 more than b." in tenants.notes[0]
