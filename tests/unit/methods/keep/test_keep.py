"""The policy as a whole: eb+ without promises, promises kept, classes, overload, late requests served."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.request import NO_SLO, Slo
from headgate.core.view import Limits
from headgate.cost.card import load_card
from headgate.experiment.library import card_engine, simulate
from headgate.methods.eb.hybrid import ExclusivePlus
from headgate.methods.keep.order import LONG
from headgate.methods.keep.policy import SITS_OUT, Keep
from headgate.sim.engine.engine import Engine
from headgate.stats.gaps import Gaps
from headgate.workloads.arrivals import arrival_process
from headgate.workloads.lengths import LogNormal, Uniform
from headgate.workloads.synthetic import Share, generate
from headgate.workloads.workload import Kind, Workload
from worlds import PRICES, Line, batches, engines, run, workloads

CARD = "cal-h200-qwen3-8b"


def chat(
    rate: float, requests: int, promises: Slo, prompt: float = 1000.0, output: float = 120.0
) -> Workload:
    """Open loop, long-tailed prompts."""
    process = arrival_process("poisson", rate, None)
    return generate(
        requests,
        seed=1,
        arrivals=process,
        classes=[Share(1.0, Kind("chat", promises), LogNormal(prompt, 1.0), Uniform(output))],
        name="chat",
    )


def gaps_of(run_):
    return np.concatenate([each for each in Gaps(run_).lists() if len(each)])


def first_tokens(run_):
    return run_.requests["first_token"] - run_.requests["arrival"]


# -- without promises ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data(), engine=engines(), workload=workloads(impatient=True), ahead=st.booleans())
def test_without_promises_it_is_eb_plus(data, engine, workload, ahead):
    slots = data.draw(st.integers(1, engine.running + 2))
    budget = data.draw(st.integers(slots, engine.batch_tokens + slots))
    ours, theirs = Keep(slots, budget, PRICES), ExclusivePlus(slots, budget, PRICES)
    first = run(engine, ours, workload, asynchronous=ahead)
    second = run(engine, theirs, workload, asynchronous=ahead)
    assert first.steps == second.steps
    assert first.events == second.events


def test_without_promises_it_is_eb_plus_at_full_load_too():
    """Enough completions for reviews, refills and a change of mode."""
    engine = card_engine("linear-h200-qwen3-8b", slots=64)
    rng = np.random.default_rng(5)
    workload = Workload.of(rng.integers(50, 600, 700), rng.integers(1, 200, 700), clients=90)
    logs = [run(engine, kind(64, 8192, engine.cost), workload) for kind in (Keep, ExclusivePlus)]
    assert logs[0].steps == logs[1].steps
    assert any(step[1] == 0 and step[3] for step in logs[0].steps[50:]), "never exclusive"


def test_promises_may_come_and_go():
    """Requests with and without promises in turn: everybody is served, whoever decides at the moment."""
    rng = np.random.default_rng(2)
    kinds = (Kind("batch"), Kind("chat", Slo(5.0, 3.0)))
    count = 240
    workload = Workload.of(
        rng.integers(1, 60, count),
        rng.integers(1, 40, count),
        arrival=np.cumsum(rng.exponential(2.0, count)),
        kind=(np.arange(count) // 20) % 2,
        kinds=kinds,
    )
    engine = Engine(Line(), 600, 200, 64, 8, 4)
    log = run(engine, Keep(8, 64, PRICES), workload)
    again = run(engine, Keep(8, 64, PRICES), workload, leases=False)
    assert sum(event[0] == "finished" for event in log.events) == count
    assert log.steps == again.steps


# -- with promises ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("tbt", [0.06, 0.1, 0.2])
def test_gaps_keep_their_promise_and_use_it(asynchronous, tbt):
    engine = card_engine(CARD, slots=512, budget=16_384)
    promises = Slo(0.5, tbt)
    workload = chat(17.0, 1200, promises)
    found = simulate(engine, Keep(512, 16_384, engine.cost), workload, asynchronous=asynchronous)
    gaps = gaps_of(found)
    assert np.quantile(gaps, 0.99) <= tbt
    assert np.mean(gaps > tbt) < 0.005
    assert gaps.max() > 0.8 * tbt


def test_in_overload_most_first_tokens_are_in_time_and_nobody_waits_for_ever():
    engine = card_engine(CARD, slots=1024, budget=16_384)
    workload = chat(29.0, 2500, Slo(0.5, 0.1))
    found = simulate(engine, Keep(1024, 16_384, engine.cost), workload, asynchronous=True)
    waits = first_tokens(found)
    assert np.mean(waits <= 0.5) > 0.7
    assert np.mean(gaps_of(found) > 0.1) < 0.01
    last = found.requests["arrival"].max()
    served_early = np.mean((waits > 2.0) & (found.requests["first_token"] < last))
    assert served_early > 0.002, "the late get their share before the load ends"


def test_each_class_keeps_its_own_promise():
    engine = card_engine(CARD, slots=512, budget=16_384)
    classes = [
        Share(0.3, Kind("voice", Slo(0.4, 0.05)), Uniform(400.0), Uniform(80.0)),
        Share(0.7, Kind("report", Slo(4.0, 0.2)), Uniform(1500.0), Uniform(150.0)),
    ]
    process = arrival_process("poisson", 10.0, None)
    workload = generate(900, seed=3, arrivals=process, classes=classes, name="mix")
    found = simulate(engine, Keep(512, 16_384, engine.cost), workload, asynchronous=True)
    lists = Gaps(found).lists()
    for number, (ttft, tbt) in enumerate([(0.4, 0.05), (4.0, 0.2)]):
        rows = found.requests["kind"] == number
        assert np.quantile(first_tokens(found)[rows], 0.95) <= ttft
        gaps = np.concatenate([lists[row] for row in np.flatnonzero(rows) if len(lists[row])])
        assert np.quantile(gaps, 0.99) <= tbt


def beside(chat_rate: float, batch_rate: float, requests: int, batch: float) -> Workload:
    """Chat with promises, and prompts of about `batch` tokens without."""
    rate = chat_rate + batch_rate
    classes = [
        Share(chat_rate / rate, Kind("chat", Slo(0.5, 0.1)), LogNormal(1000.0, 1.0), Uniform(200.0)),
        Share(batch_rate / rate, Kind("batch"), Uniform(batch), Uniform(100.0)),
    ]
    process = arrival_process("poisson", rate, None)
    return generate(requests, seed=1, arrivals=process, classes=classes, name="mix")


@pytest.mark.parametrize("batch", [800.0, 6000.0])
def test_a_promise_makes_no_request_worse_off(batch):
    """Chat alone would fill half the engine; the others are more than the rest, short or long."""
    engine = card_engine(CARD, slots=512, budget=8192)
    workload = beside(12.0, 24.0 * 800 / batch, int(36 * 60 * (1 if batch == 800 else 0.4)), batch)
    found = simulate(engine, Keep(512, 8192, engine.cost), workload, asynchronous=True)
    waits, chat = first_tokens(found), found.requests["kind"] == 0
    assert np.mean(waits[chat] <= 0.5) > 0.97
    assert waits[chat].max() < 2.0
    assert np.median(waits[~chat]) > 1.0, "there was more to do than the engine can"


def test_without_a_promise_a_request_waits_long_and_not_for_ever():
    """Chat alone is more than the engine can serve."""
    engine = card_engine(CARD, slots=512, budget=8192)
    workload = beside(34.0, 0.2, 3000, 3000.0)
    found = simulate(engine, Keep(512, 8192, engine.cost), workload, asynchronous=True)
    waits, batch = first_tokens(found), found.requests["kind"] == 1
    early = batch & (found.requests["arrival"] < found.requests["arrival"].max() - 45.0)
    assert early.sum() > 3
    assert np.all(waits[early] < LONG + 15.0)
    assert np.mean(waits[~batch] <= 0.5) > 0.7


def test_a_favoured_request_without_a_promise_whose_kv_does_not_fit_holds_up_no_promised_one():
    """600 of 1,000 KV tokens are taken; it needs 500, and another without a promise 50."""
    ledger, policy = Ledger(Limits(1024, 8), kv_total=1000), Keep(8, 1024, PRICES)
    chat = Slo(20.0, 20.0)
    rows = ((600, chat), (500, NO_SLO), (50, NO_SLO), (100, chat))
    for id, (prompt, slo) in enumerate(rows):
        entry = Entry(ledger, id, 0.0 if id < 3 else LONG + 1, prompt, limit=50, slo=slo)
        ledger.arrive(entry)
        policy.arrived(entry, entry.arrival)
    decoding = ledger.waiting[0]
    ledger.admit(decoding)
    policy.admitted(decoding, 0.0)  # credit for those without a promise
    ledger.join(decoding, 0.0, rolling=True)
    policy.prefilled(decoding, 0.0)
    ledger.now, ledger.kv_free = LONG + 10, 400
    assert policy.plan(ledger).prefill == (3,)
    ledger.kv_free = 1000
    assert policy.plan(ledger).prefill[0] == 1


def test_an_evicted_request_behind_more_urgent_ones_is_served():
    """As vLLM shows it under `--scheduling-policy priority`."""
    ledger, policy = Ledger(Limits(1024, 8), kv_total=1000), Keep(8, 1024, PRICES, ttft=20.0, tbt=20.0)
    evicted, urgent = [Entry(ledger, id, 0.0, 100, limit=50, priority=-id) for id in range(2)]
    for entry in (evicted, urgent):
        ledger.arrive(entry)
        policy.arrived(entry, 0.0)
    ledger.admit(evicted)
    policy.admitted(evicted, 0.0)
    ledger.evict(evicted)
    policy.evicted(evicted, 0.0)
    ledger.waiting.move_to_end(0)
    assert policy.plan(ledger).prefill == (0, 1)
    assert policy.gauges()["queued"] == 2


def test_half_done_prompts_without_a_promise_sit_out_a_bounded_number_of_steps():
    """One of 60,000 tokens is half-done when more promised ones come than the engine can serve, each of which
    takes several steps.
    """
    engine = card_engine(CARD, slots=512, budget=8192)._replace(max_model_len=100_000)
    count = 200
    workload = Workload.of(
        [60_000, *[6000] * count],
        [10, *[20] * count],
        arrival=[0.0, *(0.2 + np.arange(count) / 15.0)],
        kind=[0, *[1] * count],
        kinds=(Kind("batch"), Kind("chat", Slo(0.5, 0.1))),
    )
    steps = [step for step in batches(engine, Keep(512, 8192, engine.cost), workload) if step.chunks]
    promised = next(step for step in steps if step.chunks[0][0])
    assert promised.start < 0.5, "the first promised one does not wait for all of it"
    missed, most = 0, []
    for step in steps[: max(place for place, step in enumerate(steps) if step.chunks[0][0] == 0)]:
        missed = 0 if step.chunks[0][0] == 0 else missed + 1
        most.append(missed)
    assert max(most) == SITS_OUT
    assert most.count(SITS_OUT) > 2


def test_prompts_break_no_gap_that_decodes_alone_keep_and_do_not_starve():
    """A launch with prompts takes 12 ms and the GPU 5.5: at 12 ms prompts run when no request decodes, or
    when they have waited long.
    """
    engine = card_engine(CARD, slots=512, budget=8192)
    found = simulate(
        engine, Keep(512, 8192, engine.cost), chat(2.0, 300, Slo(0.5, 0.012), output=200.0), asynchronous=True
    )
    assert np.mean(gaps_of(found) > 0.012) < 0.001
    assert first_tokens(found).max() < 10.0


@pytest.mark.parametrize(("late", "most"), [(0.001, 1000), (0.05, 20)])
def test_prompts_that_find_no_room_wait_for_a_bounded_number_of_steps(late, most):
    """One request decodes for 3,000 steps."""
    engine = card_engine(CARD, slots=512, budget=8192)
    kinds = (Kind("chat", Slo(0.5, 0.011)),)
    workload = Workload.of([100, 1000], [3000, 2], arrival=[0.0, 0.1], kinds=kinds)
    found = batches(
        engine, Keep(512, 8192, engine.cost, late=late, learn=False), workload, asynchronous=False
    )
    second = next(step for step in found if any(id == 1 for id, _, _ in step.chunks))
    waited = [step for step in found if 0.1 <= step.start < second.start]
    assert sum(len(step.ends) for step in waited) == pytest.approx(most, abs=2)
    assert second.chunks == ((1, 1, 1000),)


def test_only_steps_in_a_row_count_for_prompts_that_find_no_room():
    """The second is gone after half of the steps; a third, which comes later, waits for as many as any."""
    engine = card_engine(CARD, slots=512, budget=8192)
    kinds = (Kind("chat", Slo(0.5, 0.011)),)
    workload = Workload.of(
        [100, 1000, 1000], [3000, 2, 2], arrival=[0.0, 0.1, 1.5], patience=[np.inf, 0.27, np.inf], kinds=kinds
    )
    found = batches(
        engine, Keep(512, 8192, engine.cost, late=0.01, learn=False), workload, asynchronous=False
    )
    third = next(step for step in found if any(id == 2 for id, _, _ in step.chunks))
    assert all(id != 1 for step in found for id, _, _ in step.chunks)
    waited = [step for step in found if 1.5 <= step.start < third.start]
    assert sum(len(step.ends) for step in waited) == pytest.approx(100, abs=2)


def test_a_loose_gap_is_used_for_exclusive_refills():
    """With half a second between tokens, prompts run apart in large steps; at 50 ms they cannot."""
    engine = card_engine(CARD, slots=1024, budget=16_384)
    apart = []
    for tbt in (0.5, 0.05):
        workload = chat(10.0, 900, Slo(2.0, tbt), prompt=2300.0, output=440.0)
        log = run(engine, Keep(1024, 16_384, engine.cost), workload, asynchronous=True)
        busy = [step for step in log.steps if step[3]][100:-100]
        apart.append(np.mean([step[3] for step in busy if not step[1]] or [0]))
    assert apart[0] > 4000 > 2000 > apart[1]


def test_a_first_token_alone_may_be_promised():
    engine = card_engine(CARD, slots=256, budget=8192)
    found = simulate(engine, Keep(256, 8192, engine.cost), chat(12.0, 400, Slo(0.5, None)))
    assert np.quantile(first_tokens(found), 0.95) <= 0.5
    assert gaps_of(found).max() < 3.0


@pytest.mark.parametrize(
    "words",
    [{"ttft": 0.0}, {"tbt": -1.0}, {"trust": 0.0}, {"trust": 1.5}, {"late": 1.0}, {"patience": 1.0}],
)
def test_promises_and_shares_make_sense(words):
    with pytest.raises(InputError, match=next(iter(words))):
        Keep(4, 64, load_card(CARD).cost, **words)
