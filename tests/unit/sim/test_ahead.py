"""When an asynchronous engine composes, runs and sees a step, in seconds that can be checked by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import NONE, Plan, Until
from headgate.core.view import Limits
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Chunk, Shape
from headgate.experiment.library import simulate
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import SHORTEST, Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Workload
from worlds import Log

SECOND = WorkTerms(constant=1.0, per_token=0.0)  # every step takes the GPU a second


def served(prompt, output, arrival=None, *, host=None, slots=4, kv=1600, terms=SECOND, clients=None, more=0):
    """Under mixed batching, outputs `more` tokens shorter than their limit; the run and all that was told."""
    engine = Engine(WorkCost(terms, host), kv, 800, 512, slots, 16).checked()
    log = Log()
    load = {"clients": clients} if clients else {"arrival": arrival or [0.0] * len(prompt)}
    workload = Workload.of(prompt, output, limit=[tokens + more for tokens in output], **load)
    return simulate(engine, Mixed(slots, 512), workload, asynchronous=True, observers=(log,)), log


def firsts(*args, **words):
    return served(*args, **words)[0].requests["first_token"].tolist()


def test_who_comes_during_a_step_enters_in_the_one_after_the_next():
    assert firsts([10, 10], [6, 2], [0.0, 1.5]) == [1.0, 4.0]  # the step from 2 to 3 was composed at 1


def test_a_slot_that_came_free_is_given_away_one_step_later():
    assert firsts([10, 10, 10], [2, 9, 1], slots=2) == [1.0, 1.0, 4.0]


def test_memory_that_came_free_is_given_away_one_step_later():
    """Four blocks: two hold two each, the third finds room when the tokens of the first were seen."""
    assert firsts([20, 20, 20], [2, 9, 1], kv=64) == [1.0, 1.0, 4.0]


def test_whose_output_ends_by_itself_is_in_one_step_more():
    """The engine knows of the end when it has seen the last token, at 2; the step after it runs until 3."""
    run, log = served([10, 10], [2, 1], [0.0, 1.5], more=7)
    assert run.requests["finished"].tolist() == [2.0, 4.0]
    assert run.requests["output"].tolist() == [2, 1]
    assert [step[:2] for step in log.steps] == [(1.0, 0), (2.0, 1), (3.0, 1), (4.0, 0), (5.0, 1)]
    assert firsts([10, 10], [2, 1], [0.0, 1.5]) == [1.0, 3.0]  # it knew


def test_a_host_without_work_changes_nothing():
    words = {"prompt": [10, 20, 30], "output": [5, 1, 9], "arrival": [0.0, 0.5, 3.2]}
    without, nothing = served(**words)[1], served(**words, host=HostTerms(0.0))[1]
    assert (without.steps, without.events) == (nothing.steps, nothing.events)


def test_tokens_are_seen_late_while_a_step_with_prompts_is_launched():
    """Nothing is done before it has been launched: the first step ends at 1.8, the second at 2.8.

    A prompt comes at 2.5. Its step is composed at 2.8 and keeps the host until 4.6; the GPU has done the
    step before it at 3.8 and that step at 4.8. So two gaps of a second become one of 1.8 and one of 0.2.
    """
    _, log = served([10, 10], [7, 1], [0.0, 2.5], host=HostTerms(0.0, prompts=1.8))
    assert [step[3] for step in log.steps] == [10, 0, 0, 10, 0, 0, 0]
    assert [round(step[0], 9) for step in log.steps] == [1.8, 2.8, 4.6, 4.8, 5.8, 6.8, 7.8]


def test_the_host_is_waited_for_where_it_takes_longer():
    _, log = served([10], [9], host=HostTerms(constant=1.5))
    ends = [step[0] for step in log.steps]
    gaps = [round(b - a, 9) for a, b in pairwise(ends)]
    assert gaps[1:-1] == [1.5] * 6


def test_the_floor_of_the_card_is_not_paid_beside_the_host():
    floor = WorkTerms(constant=1.0, per_token=0.0, host_constant=7.0)
    assert firsts([10], [2], terms=floor) == [7.0]
    assert firsts([10], [2], terms=floor, host=HostTerms(0.5)) == [1.0]


def test_a_client_sends_its_next_request_when_it_sees_the_last_token():
    run, _ = served([10, 10], [3, 1], host=HostTerms(0.0, prompts=1.8), clients=1)
    assert run.requests["arrival"][1] == run.requests["finished"][0]


def test_only_tokens_of_that_step_are_dated_anew():
    """A step is composed when the one before the last is seen: the times are equal."""
    ledger = Ledger(Limits(64, 4, 16), 64)
    early, late, later = (Entry(ledger, id, 0.0, 5, 9) for id in (0, 1, 2))
    for entry in (early, late, later):
        ledger.arrive(entry)
        ledger.admit(entry)
        ledger.join(entry, 2.0, rolling=False)
    dated = [(late, 1), (later, 1)]
    ledger.recount(later, 2)  # it has got another token since then
    ledger.redate(2.5, False, dated)
    assert (early.last_token, late.last_token, later.last_token) == (2.0, 2.5, 2.0)


def test_what_a_host_takes():
    host = HostTerms(constant=1.0, per_request=0.1, prompts=3.0, ungraphed=7.0, graph=64)
    chunks = (Chunk(0, 30), Chunk(0, 30))
    assert host.seconds(Shape(5, 500)) == 1.5
    assert host.seconds(Shape(4, 400, 60, 0, chunks)) == pytest.approx(1 + 0.6 + 3)
    assert host.seconds(Shape(5, 500, 60)) == pytest.approx(1 + 0.6 + 7)  # 65 tokens, one prompt
    assert HostTerms(1.0, ungraphed=7.0).seconds(Shape(5, 500, 60)) == 1.0  # no graph is known


def test_an_engine_that_forgets_is_not_asynchronous():
    engine = Engine(WorkCost(SECOND), 1600, 800, 512, 4, 16)
    with pytest.raises(InputError, match="give one of the two"):
        simulate(engine, Mixed(4, 512), Workload.of([10], [2], arrival=[0.0]), asynchronous=True, lost=1)


class RetractsTwice(Mixed):
    """Retracts the first request, and again as soon as its prompt has been computed anew."""

    def __init__(self):
        super().__init__(4, 512)
        self.retracted = 0
        self.dates = []  # of its newest token, as seen after each

    def plan(self, view):
        waits, decodes = view.waiting.get(0), view.decoding.get(0)
        if waits is not None and len(self.dates) < self.retracted:
            self.dates.append((waits.generated, waits.last_token))
        if decodes is not None and (self.retracted == 1 or (not self.retracted and decodes.generated > 5)):
            self.retracted += 1
            return Plan(NONE, evict=(0,))
        return super().plan(view)._replace(until=Until(steps=1))


def test_the_newest_token_of_one_retracted_while_its_prompt_is_on_its_way():
    """SGLang drops that token: the newest is the one it had before, and of its time."""
    engine = Engine(WorkCost(WorkTerms(0.5, 0.01, 0.02, 0.001)), 16000, 800, 512, 4, 16, retraction=SHORTEST)
    policy = RetractsTwice()
    Simulator(engine, policy, Workload.of([20, 20], [40, 80]), asynchronous=True, leases=False).run()
    (first, then), (again, later) = policy.dates
    assert first == again
    assert then == later
