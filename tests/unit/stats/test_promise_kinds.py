"""Kinds of promise between tokens, judged from the tables and by a plain loop over every token of a run."""

from __future__ import annotations

import math

import numpy as np
import pytest

import headgate
from headgate.advisor.capacity.traffic import Level, measure
from headgate.core.errors import InputError
from headgate.core.policy import Observer
from headgate.cost.laws.speculation import Acceptance
from headgate.cost.laws.terms import DraftTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.methods.make import make_policy
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine, Speculation
from headgate.sim.engine.simulator import Simulator
from headgate.stats.gaps import Gaps
from headgate.stats.measured import Measured, envelopes

TTFT = 0.5
GPU = WorkTerms(constant=0.008, per_token=2e-5, per_decode=2e-5, per_context=1e-7)


class EveryToken(Observer):
    """When each token of each request came, read from the requests after every single step."""

    def __init__(self) -> None:
        self.here, self.times = {}, {}

    def arrived(self, request, now):
        self.here[request.id], self.times[request.id] = request, []

    def stepped(self, steps):
        for request in self.here.values():
            self.note(request)

    def prefilled(self, request, now):
        self.note(request)

    def evicted(self, request, now):
        self.note(request)

    def finished(self, request, now, how):
        self.note(self.here.pop(request.id))

    def note(self, request):
        times = self.times[request.id]
        times += [request.last_token] * (request.generated - len(times))


def ran(policy: str, speculation: Speculation | None = None, kinds: tuple = ()) -> tuple[Run, list]:
    """A run short of KV, so that requests are evicted, and the times of all its tokens."""
    drafting = DraftTerms(speculation.drafts, 0.0, 0.0, 0.0) if speculation else None
    engine = Engine(WorkCost(GPU, drafting=drafting), 6000, 2048, 512, 32, speculation=speculation)
    law = headgate.length_law("lognormal", 150)
    process = headgate.arrival_process("poisson", 40.0 if speculation else 12.0)
    work = headgate.generate(150, seed=3, arrivals=process, prompt=law, output=law)
    log, recorder = EveryToken(), Recorder([""])
    Simulator(engine, make_policy(policy, {}, engine)[0], work, (log, recorder), leases=False).run()
    meta = {"speculation": {"drafts": speculation.drafts}} if speculation else {}
    return Run(meta | {"kinds": list(kinds)}, **recorder.tables()), [
        log.times[id] for id in sorted(log.times)
    ]


def needed(times, due) -> float:
    """The least T for which token j came by due + j x T."""
    if not times[0] <= due:
        return math.inf
    return max((max(0.0, (time - due) / j) for j, time in enumerate(times) if j), default=0.0)


@pytest.mark.parametrize("policy", ["mixed", "slai", "eb+", "keep"])
def test_every_kind_is_that_of_a_loop_over_all_tokens(policy):
    run, tokens = ran(policy)
    assert run.requests["evictions"].sum() > 5
    arrival = run.requests["arrival"]
    found = envelopes(run, Gaps(run), np.full(len(tokens), TTFT))
    expected = np.array([needed(times, arrival[id] + TTFT) for id, times in enumerate(tokens)])
    assert 20 < np.isfinite(expected).sum() < len(tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    for kind, figure, limit in (
        ("gap", lambda times: np.diff(times).max(), 0.05),
        ("mean", lambda times: np.diff(times).mean(), 0.02),
    ):
        run.meta["kinds"] = [{"name": "", "first_token": TTFT, "between_tokens": limit, "between_kind": kind}]
        kept = [
            times[0] <= arrival[id] + TTFT and (len(times) < 2 or figure(times) <= limit)
            for id, times in enumerate(tokens)
        ]
        assert Measured(run).promises.met.tolist() == kept
        assert 0 < sum(kept) < len(kept)


def test_held_decodes_are_there():
    stays = ran("slai")[0].stays
    again = np.isin(stays["request"], stays["request"][np.isnan(stays["gap"])]) & np.isnan(stays["gap"])
    assert again.sum() > len(np.unique(stays["request"][again]))


def test_goodput_by_envelope():
    """Each token is due by itself: a long gap is paid with what earlier tokens saved."""
    run, tokens = ran("mixed")
    limit = 0.02
    kind = {"name": "", "first_token": TTFT, "between_tokens": limit, "between_kind": "envelope"}
    run.meta["kinds"] = [kind]
    arrival = run.requests["arrival"]
    kept = [
        all(time <= arrival[id] + TTFT + j * limit + 1e-12 for j, time in enumerate(times))
        for id, times in enumerate(tokens)
    ]
    found = Measured(run, "all")
    assert found.promises.met.tolist() == kept
    assert found.metrics.goodput.share.value == pytest.approx(np.mean(kept))
    assert found.metrics.kinds[0].between_kind == "envelope"
    run.meta["kinds"] = [kind | {"between_kind": "gap"}]
    assert Measured(run, "all").promises.met.sum() < sum(
        kept
    )  # the same number, as a gap, is the harder promise


def test_an_envelope_without_a_first_token_is_refused():
    kinds = (headgate.Kind("chat", headgate.Slo(None, 0.05, "envelope")),)
    with pytest.raises(InputError, match="kind 'chat' has an envelope, which begins at first_token"):
        headgate.Workload.of([10], [2], kinds=kinds)


@pytest.mark.parametrize("accept", [0.0, 0.7, 1.0])
def test_speculation_spreads_a_request_s_tokens_evenly(accept):
    """Gaps are between deliveries and exact. Which delivery brought how many tokens is not in the tables:
    the envelope is exact where all bring the same, and near it otherwise."""
    run, tokens = ran("mixed", Speculation(3, Acceptance(accept)))
    assert run.requests["evictions"].sum() > 5
    longest = [max(np.diff(sorted(set(times))), default=math.nan) for times in tokens]
    np.testing.assert_allclose(Gaps(run).longest(), longest, rtol=0, atol=1e-12)
    arrival = run.requests["arrival"]
    found = envelopes(run, Gaps(run), np.full(len(tokens), TTFT))
    expected = np.array([needed(times, arrival[id] + TTFT) for id, times in enumerate(tokens)])
    assert np.array_equal(np.isfinite(found), np.isfinite(expected))
    if accept == 0.0:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    else:
        for limit in (0.001, 0.002, 0.004, 0.01, 0.03, 0.1):
            assert np.mean(found <= limit) == pytest.approx(np.mean(expected <= limit), abs=0.02)


def test_the_levels_of_a_search_are_these_figures():
    run, tokens = ran("mixed")
    levels = (Level("ttft", TTFT, "p50"), Level("gap", 0.1, "p90"), Level("envelope", 0.1, "p50"))
    values = measure(run, levels).values
    keep = Measured(run).window.keep
    arrival = run.requests["arrival"]
    longest = [np.diff(times).max() for id, times in enumerate(tokens) if keep[id] and len(times) > 1]
    assert values[1] == pytest.approx(np.quantile(longest, 0.9))
    needs = [needed(times, arrival[id] + TTFT) for id, times in enumerate(tokens) if keep[id]]
    assert values[2] == pytest.approx(np.median(needs))
    late = (levels[0], Level("envelope", 0.1, "p99.9"))  # a first token was late: no T is enough
    assert (measure(run, late).values[1] == math.inf) == (max(needs) == math.inf)
