"""Predictions against the simulator: engines in random states, and engines under random traffic."""

from math import inf

import numpy as np
import pytest

import headgate
from headgate.cost.card import list_cards, load_card
from headgate.cost.model import Chunk, Shape
from headgate.methods.bounds import Requests, engine_bound
from headgate.methods.latency import KINDS, Correction, EngineStates, LatencyModel, Traffic, features_of

CARDS = ("cal-h200-qwen3-8b", "cal-h200-qwen3-4b", "linear-h200-qwen3-8b", "pub-rtx-pro-6000-qwen3-8b")
OUTPUT = 64


@pytest.mark.parametrize("name", list_cards())
def test_many_steps_at_once_take_what_each_takes_alone(name):
    rng, card, count = np.random.default_rng(0), load_card(name), 200
    decodes = rng.integers(0, card.max_running, count).astype(float)
    context = decodes * rng.integers(1, 2000, count)
    prompts = rng.integers(1, 6, count).astype(float)
    prefill = np.where((rng.random(count) < 0.3) & (decodes > 0), 0.0, prompts * rng.integers(1, 1000, count))
    behind = np.where(prefill > 0, prompts * rng.integers(0, 2000, count), 0.0)
    at_once = card.cost.many(decodes, context, prefill, behind, prompts)
    for row in range(count):
        parts = int(prompts[row])
        chunk = Chunk(int(behind[row]) // parts, int(prefill[row]) // parts)
        shape = Shape(
            int(decodes[row]), int(context[row]), int(prefill[row]), int(behind[row]),
            (chunk,) * parts if prefill[row] else (),
        )  # fmt: skip
        assert at_once[row] == pytest.approx(card.cost.seconds(shape), rel=1e-12)


def model_of(name, slots, budget, policy="mixed"):
    card, engine = load_card(name), headgate.card_engine(name, slots=slots, budget=budget)
    cost = engine.cost.unhosted() if card.host else engine.cost
    limits = {"slots": slots, "budget": budget, "kv_tokens": engine.kv_tokens}
    return engine, LatencyModel(
        cost, **limits, kind=KINDS[policy], ahead=card.host is not None, host=card.host
    )


def one_state(rng, policy):
    """Predicted over simulated TTFT and TPOT of a request that finds an engine in a random state; then no
    other comes. None where the state is not what was drawn: an engine too full.
    """
    slots, budget = int(rng.choice([64, 256])), int(rng.choice([2048, 8192]))
    engine, model = model_of(str(rng.choice(CARDS)), slots, budget, policy)
    decodes = int(rng.integers(0, slots * 3 // 4))
    waiting = int(rng.integers(0, 9)) if rng.random() < 0.6 else 0
    longest = min(2000.0, engine.kv_tokens * 0.6 / max(decodes, 1))
    prompts = np.maximum(rng.gamma(2, longest / 2, decodes).astype(int), 16)
    mean = float(rng.uniform(100, 3000))
    queue = np.minimum(rng.gamma(2, mean / 2, waiting + 1).astype(int) + 16, 8000)
    comes = 0.0
    if decodes:
        alone = headgate.simulate(engine, policy, headgate.Workload.of(prompts, [2500] * decodes))
        comes = float(alone.requests["first_token"].max() + rng.uniform(0.05, 0.3))
    arrival = [0.0] * decodes + [comes] * waiting + [comes + 1e-6]
    outputs = [2500] * decodes + [600] * waiting + [OUTPUT]
    requests = headgate.Workload.of([*prompts, *queue], outputs, arrival=arrival)
    run = headgate.simulate(engine, policy, requests).requests
    first, end, last = run["first_token"], run["finished"], decodes + waiting
    made = 1 + 2499 * (comes - first[:decodes]) / (end[:decodes] - first[:decodes])
    held = float((prompts + made).sum())
    if held + queue.sum() + decodes * 100 > engine.kv_tokens:
        return None
    row = (decodes, waiting, held / engine.kv_tokens, queue[-1], 0, queue[:-1].sum())
    states = EngineStates(*(np.array([float(value)]) for value in row))
    ttft, tpot = model.predict(states, Traffic(mean, float(OUTPUT), entering=0.0))
    seen = (end[last] - first[last]) / (OUTPUT - 1)
    return ttft[0] / (first[last] - arrival[last]), tpot[0] / seen


@pytest.mark.parametrize("policy", ["mixed", "v0"])
def test_a_request_that_finds_a_random_state_is_predicted(policy):
    """TTFT within 15 % and TPOT within 5 %, most of the time; the rest of the step under way is not known.

    Seen with this seed: TTFT median 2 to 3 %, p90 15 to 18 %; TPOT median 0.5 %, p90 2 to 3 %.
    """
    rng = np.random.default_rng(1)
    found = np.array([pair for _ in range(120) if (pair := one_state(rng, policy)) is not None])
    assert len(found) > 100
    ttft, tpot = np.abs(found - 1).T
    assert np.median(ttft) < 0.05 and np.quantile(ttft, 0.8) < 0.15 and np.quantile(ttft, 0.9) < 0.25
    assert np.median(tpot) < 0.01 and np.quantile(tpot, 0.9) < 0.05


def rows_of(run, kv_tokens):
    """What a router saw of the engine whenever a request came."""
    seen = run.requests
    arrival, admitted, first, end = (
        seen[name] for name in ("arrival", "admitted", "first_token", "finished")
    )
    prompt, output = seen["prompt"].astype(float), seen["output"].astype(float)
    rows = np.zeros((len(arrival), 6))
    for row, now in enumerate(arrival):
        here = (arrival < now) & (end > now)
        waits = here & (admitted > now)
        made = np.where(first <= now, 1 + (output - 1) * (now - first) / np.maximum(end - first, 1e-9), 0)
        held = (prompt + made)[here & ~waits].sum() / kv_tokens
        ahead = prompt[here & (first > now)].sum()
        rows[row] = (here & ~waits).sum(), waits.sum(), min(held, 1.0), prompt[row], 0, ahead
    return EngineStates(*rows.T)


def under_traffic(rng, slow=1.0):
    """Relative errors of TTFT and TPOT under Poisson arrivals, as by the card and as corrected online.

    `slow`: the engine takes so much longer than its card says, in every step.
    """
    slots, budget = int(rng.choice([64, 256])), int(rng.choice([2048, 8192]))
    name = str(rng.choice(CARDS[:3]))
    engine, model = model_of(name, slots, budget)
    count, mean, output = 600, float(rng.uniform(200, 2500)), float(rng.uniform(50, 400))
    prompts = np.minimum(rng.gamma(1.5, mean / 1.5, count).astype(int) + 8, 16_000)
    outputs = np.minimum(rng.geometric(1 / output, count), 3000)
    lengths = Requests.of(prompts.astype(float), np.maximum(outputs - 1.0, 0))
    bound = engine_bound(engine.cost, lengths, engine.running, engine.batch_tokens, engine.kv_tokens)
    rate = float(rng.uniform(0.2, 0.8)) / bound.seconds
    arrival = np.cumsum(rng.exponential(1 / rate, count))
    run = headgate.simulate(engine, "mixed", headgate.Workload.of(prompts, outputs, arrival=arrival))
    states, seen = rows_of(run, engine.kv_tokens), run.requests
    first, end = seen["first_token"], seen["finished"]
    measured = {"ttft": slow * (first - arrival), "tpot": slow * (end - first) / np.maximum(outputs - 1, 1)}
    by_card = model.predict(states, Traffic(float(prompts.mean()), float(outputs.mean())))
    features = features_of(states, slots, budget)
    judged = np.arange(count) > count // 3
    errors = {}
    for name, predicted, known in zip(measured, by_card, (first, end), strict=True):
        correction, corrected = Correction(), predicted.copy()
        tells = np.ones(count, bool) if name == "ttft" else outputs >= 16
        told = [(time, row) for row, time in enumerate(arrival)]
        told += [(time, count + row) for row, time in enumerate(known) if tells[row]]
        for _, event in sorted(told):
            one = slice(event % count, event % count + 1)
            if event < count:
                corrected[one] = predicted[one] * correction.factors(features[one])
            else:
                correction.learn(features[one], predicted[one], measured[name][one])
        use = judged if name == "ttft" else judged & (outputs >= 32)
        errors[name] = [np.abs(each[use] / measured[name][use] - 1) for each in (predicted, corrected)]
    return errors


def test_under_random_traffic_predictions_hold_although_the_future_is_not_known():
    """Median errors seen with this seed: TTFT 8 % by the card and 9 % corrected; TPOT 13 % and 13 %.

    A request's TPOT depends on prompts that come after it: no prediction knows them.
    """
    rng = np.random.default_rng(3)
    worlds = [under_traffic(rng) for _ in range(8)]
    medians = {
        name: [float(np.median(np.concatenate([world[name][kind] for world in worlds]))) for kind in (0, 1)]
        for name in ("ttft", "tpot")
    }
    assert max(medians["ttft"]) < 0.15
    assert max(medians["tpot"]) < 0.15


def test_an_engine_slower_than_its_card_is_learned():
    rng = np.random.default_rng(4)
    worlds = [under_traffic(rng, slow=1.8) for _ in range(6)]
    for name in ("ttft", "tpot"):
        by_card, corrected = (
            float(np.median(np.concatenate([world[name][kind] for world in worlds]))) for kind in (0, 1)
        )
        assert by_card > 0.4
        assert corrected < 0.5 * by_card


def test_an_observation_moves_the_correction_by_a_bounded_amount():
    correction = Correction()
    features = np.ones((1, 4))
    correction.learn(features, np.array([0.1]), np.array([1e9]))
    assert 1 < correction.factors(features)[0] < 4
    for _ in range(1000):
        correction.learn(features, np.array([0.1]), np.array([1e9]))
    assert correction.factors(features)[0] <= 4.0001
    for _ in range(8000):
        correction.learn(features, np.array([0.1]), np.array([0.1]))
    assert correction.factors(features)[0] == pytest.approx(1, abs=0.05)


def test_more_work_ahead_never_brings_a_token_sooner():
    _, model = model_of("cal-h200-qwen3-8b", 64, 2048)
    count = 50
    same = np.ones(count)
    ahead = np.arange(count) * 700.0
    states = EngineStates(30 * same, 0 * same, 0.2 * same, 900 * same, 0 * same, ahead)
    ttft, _ = model.predict(states, Traffic(900.0, 200.0))
    assert (np.diff(ttft) > -0.02).all() and ttft[-1] > 5 * ttft[0]


def test_a_promised_gap_bounds_the_prompts_of_a_step():
    _, model = model_of("cal-h200-qwen3-8b", 256, 8192, "keep")
    some = np.array([100.0])
    room = model._room(some, some * 800)
    assert model._seconds(some, some * 800, room, some * 0, some * 0 + 1)[0] <= model.gap
    assert 100 < room[0] < 8192 - 100
    assert (
        inf
        > model.predict(
            EngineStates(some, some * 0, some * 0 + 0.1, some * 80, some * 0, some * 0), Traffic(900.0, 200.0)
        )[0][0]
        > 0
    )
