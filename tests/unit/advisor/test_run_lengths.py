"""Runs are long enough for their answer, or the answer says that they are not."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from headgate.advisor.capacity import plan as lengthening
from headgate.advisor.capacity.plan import PolicyRate, Searched, at_the_edge, put_together
from headgate.advisor.capacity.search import Search
from headgate.advisor.capacity.traffic import parse_levels
from headgate.advisor.capacity.trials import RateOutcome, usual_stay
from headgate.cli import app
from headgate.cost.card import load_card
from headgate.stats.figures import Spread

WORDS = (
    "plan capacity --prompt 300 --output 30 --slo ttft=200ms@p95 --policy mixed --seeds 2 --jobs 1 "
    "--slots 32 --cache none"
)


def capacity(*more: str) -> dict:
    result = CliRunner().invoke(app, [*WORDS.split(), "--jobs", "1", *more, "--json", "-"])
    found = json.loads(result.stdout)
    assert result.exit_code == ("declined" in found), result.output
    return found


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(lengthening, "REQUESTS", 60)
    monkeypatch.setattr(lengthening, "MOST", 480)
    monkeypatch.setattr("headgate.advisor.capacity.plan.REQUESTS", 60)


def test_runs_get_longer_until_the_answer_stays(short):
    assert capacity()["requests_per_run"] > 60
    assert capacity("--requests", "60")["requests_per_run"] == 60


def test_an_answer_that_is_not_good_enough_says_so(short, monkeypatch):
    monkeypatch.setattr(lengthening, "TIGHT", 1e-6)
    assert any("take more --requests or --seeds" in note for note in capacity()["notes"])


def test_runs_shorter_than_ten_stays_are_told_of():
    """Three hundred tokens take seconds, a hundred requests come in five."""
    notes = capacity("--requests", "40", "--output", "300")["notes"]
    assert any("times as long as 95 % of them stay" in note for note in notes)


def told(policy, *by_seed, edge=0):
    rate = Spread.of_values(np.array(by_seed)).estimate()
    return PolicyRate(policy, rate, 0.9, by_seed, "p95", {}, 8, at_edge=edge)


def test_one_request_that_stays_asks_for_no_longer_runs():
    """What one request stays grows with the run: it would ask for more each time."""
    rows = {"arrival": np.zeros(100), "finished": np.append(np.full(99, 2.0), 900.0)}
    assert usual_stay(SimpleNamespace(requests=rows)) == 2.0


def test_runs_that_twice_the_length_did_not_change_are_enough():
    length = lengthening.Lengthening(None, {}, 20.0)
    traffic = SimpleNamespace(requests=3000, recorded=False, words=SimpleNamespace(requests=None))
    found = Searched(traffic, (told("keep", 8.5, 8.51), told("mixed", 8.0, 8.01)), 0, 100.0)
    (note,) = length.not_enough(found)
    assert "8,600 would do" in note and not length._done(found)
    (note,) = length.not_enough(found._replace(steady=True))
    assert note.endswith("half as many gave the same rates within 2 %: they are enough")
    assert length._done(found._replace(steady=True))
    stuck = found._replace(steady=True, found=(told("keep", 8.5, 8.5, edge=2),))
    assert not length._done(stuck) and "would do" in length.not_enough(stuck)[0]


def searches(*brackets: tuple[float, float]):
    found, answers = {}, {}
    for seed, (low, high) in enumerate(brackets):
        search = found["mixed", seed] = Search(20.0, 0.04)
        for rate, ratio in ((low, 0.5), (high, 2.0)):
            if rate <= 20.0:
                search.tell(rate, ratio)
                answers["mixed", seed, rate] = RateOutcome(ratio, "p95", (0.1,))
    return found, answers


def test_an_interval_is_no_narrower_than_the_brackets_it_was_found_in():
    """Seeds that end in the same bracket agree by the grid: 17.43 .. 17.43 is not what was measured."""
    found = put_together("mixed", *searches((10.0, 12.0), (10.0, 12.0)), 20.0, parse_levels(["ttft=1s@p95"]))
    assert (found.rate.low, found.rate.high) == (10.0, 12.0)
    assert not found.at_edge


def test_a_search_that_ends_at_its_edge_says_so_and_has_no_interval():
    found = put_together("mixed", *searches((20.0, 40.0), (20.0, 40.0)), 20.0, parse_levels(["ttft=1s@p95"]))
    assert found.rate.low is None and found.at_edge == 2
    (note,) = at_the_edge([found])
    assert note.endswith("ended at λ*, their upper edge: mixed (2 of 2): such rates are at most these")


def test_runs_get_longer_until_the_policy_that_will_be_the_answer_is_known():
    """Plain vLLM is, unless another is significantly better: here the seeds say nothing of it."""

    traffic = SimpleNamespace(requests=300, recorded=False, words=SimpleNamespace(requests=None))
    start = SimpleNamespace(card=load_card("cal-h200-qwen3-8b"))
    length = lengthening.Lengthening(start, {}, 20.0, plain=frozenset({"mixed"}), load=50.0)
    wide = Searched(traffic, (told("keep", 10.0, 10.1), told("mixed", 7.0, 12.0)), 0, 0.1)
    assert not length._done(wide) and wide.declined(wide.found[0], 50.0) is None
    narrow = wide._replace(found=(told("keep", 10.0, 10.1), told("mixed", 9.9, 10.0)))
    assert length._done(narrow)
