"""Promises of every kind as the metrics and a trial count them, against the tables of the same run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import headgate
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.live.engine.tally import PROMISES, ClassTally, Envelope, Envelopes
from headgate.live.trial.book import Book, Listener
from headgate.methods.make import make_policy
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.stats.measured import Measured
from headgate.workloads.workload import Kind

GPU = WorkTerms(constant=0.008, per_token=2e-5, per_decode=2e-5, per_context=1e-7)
PROMISED = {
    "gaps": headgate.Slo(0.5, 0.05),
    "pace": headgate.Slo(0.5, 0.02, "mean"),
    "lines": headgate.Slo(0.5, 0.018, "envelope"),
    "slow lines": headgate.Slo(0.3, 0.03, "envelope"),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["mixed", "slai", "keep"])
def test_the_same_requests_are_kept_as_by_the_tables(policy, asynchronous):
    engine = Engine(WorkCost(GPU), 6000, 2048, 512, 32)
    law = headgate.length_law("lognormal", 150)
    process = headgate.arrival_process("poisson", 12.0)
    work = headgate.generate(400, seed=5, arrivals=process, prompt=law, output=law)
    kinds = tuple(Kind(name, slo) for name, slo in PROMISED.items())
    work = replace(work, kinds=kinds, kind=np.arange(400) % 4)
    book = Book()
    book.begin(0, 0, 0.0, 0.0)
    tally, recorder = ClassTally(), Recorder([kind.name for kind in kinds])
    watchers = (tally, Listener(book), recorder)
    made = make_policy(policy, {}, engine)[0]
    Simulator(engine, made, work, watchers, asynchronous=asynchronous).run()
    run = Run({"kinds": [{"name": kind.name, **kind.slo.said()} for kind in kinds]}, **recorder.tables())
    assert run.requests["evictions"].sum() > 5
    met = Measured(run, "all").promises.met
    counts = tally.shown()[PROMISES]
    ttft = run.requests["first_token"] - run.requests["arrival"]
    for place, (name, word) in enumerate(zip(PROMISED, ("tbt", "tpot", "envelope", "envelope"), strict=True)):
        mine = run.requests["kind"] == place
        kept = int(met[mine].sum())
        assert book.blocks[0].by_class[name].kept == kept
        assert 10 < kept < 95
        between = Measured(run, "all").between_tokens[mine]
        alone = int(np.sum(np.nan_to_num(between) <= PROMISED[name].between_tokens))
        assert counts[name, word, "true"] == alone and counts.get((name, word, "false"), 0) == 100 - alone
        assert counts[name, "ttft", "true"] == np.sum(ttft[mine] <= PROMISED[name].first_token)


def test_those_that_left_do_not_pile_up():
    """A server that is faster than promised never takes an entry from the heap."""
    lines = Envelopes()
    for number in range(2000):
        envelope = Envelope(start=0.001 * number, pace=0.05)
        envelope.token(0.001 * number)
        lines.join(envelope)
        lines.tick(0.001 * number + 0.0005, 0)
        lines.leave(envelope)
        assert envelope.tokens == 2 and not envelope.late
    assert len(lines._heaps[0.05]) < 100


@pytest.mark.parametrize("together", [1, 16])
def test_a_late_token_counts_where_several_ticks_are_told_at_once(together):
    class Handle:
        generated = 1

    handle, lines = Handle(), Envelopes()
    envelope = Envelope(start=1.0, pace=0.02, request=handle)
    envelope.token(1.0)
    lines.join(envelope)
    ends = [1.06 + 0.01 * tick for tick in range(16)]  # the first is 40 ms late, all are by half a second
    for first in range(0, 16, together):
        handle.generated += together
        for place, end in enumerate(ends[first : first + together], 1):
            lines.tick(end, len(ends[first : first + together]) - place)
    assert envelope.late


def test_drafts_bring_tokens_sooner_than_ticks():
    class Handle:
        generated = 1

    handle = Handle()
    lines = Envelopes()
    drafted, plain = Envelope(start=1.3, pace=0.1, request=handle), Envelope(start=1.3, pace=0.1)
    for envelope in (drafted, plain):
        envelope.token(1.0)
        lines.join(envelope)
    for tick in range(1, 20):
        handle.generated += 1  # a step counts as one token, until its drafts are known
        lines.tick(1.0 + 0.25 * tick, 0)  # 0.25 s for three tokens: in time, but not for one
        handle.generated += 2
    assert (drafted.late, plain.late) == (False, True)
    lines.tick(1.0 + 0.25 * 20 + 10, 0)
    assert drafted.late
