"""Any step cost as straight lines: lines come back as they are, stairs as the lines through their middle."""

from __future__ import annotations

import pytest

from headgate.cost.card import load_card
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.cost.model import Chunk, Shape
from headgate.experiment.library import card_engine, simulate
from headgate.methods.eb.costs import Lengths, mean_prompts, nearest_costs, phase_costs
from headgate.methods.eb.prediction import exclusive_rate, mixed_rate
from headgate.methods.make import make_policy
from headgate.methods.names import BATCH
from headgate.stats.metrics import summarise
from headgate.workloads.arrivals import Poisson
from headgate.workloads.lengths import Geometric, Uniform
from headgate.workloads.synthetic import generate

ADA = "pub-rtx-ada-6000-mistral-7b"
LINES = LinearCost(
    DecodeTerms(0.01, 2e-4, 1e-7), PrefillTerms(0.02, 1e-4), MixedTerms(0.03, 1.1e-4, 2e-4, 1e-7)
)


def test_lines_come_back():
    found = nearest_costs(LINES, Lengths(300.0, 400.0), 64)  # a mean context of 500
    assert (found.decode_fixed, found.decode_per_request) == pytest.approx((0.01, 2e-4 + 500e-7))
    assert (found.prefill_fixed, found.prefill_per_token) == pytest.approx((0.02, 1e-4))
    assert found.mixed_fixed == pytest.approx(0.03)
    assert found.mixed_per_token(0.0) == pytest.approx(1.1e-4)
    assert found.mixed_per_token(1.0) == pytest.approx(2e-4 + 500e-7)


def test_stairs_become_the_line_through_their_middle():
    terms = load_card(ADA).tiles
    cost = load_card(ADA).cost
    lengths = Lengths(700.0, 200.0)
    found = phase_costs(cost, lengths, 256)
    step = terms.per_column / 128
    # Between half and all of the slots the stairs go from one column to two, and the floor hides a part.
    assert found.decode_per_request == pytest.approx(step / 2 + 5e-6 + 0.25e-6 * lengths.context, rel=0.35)
    attention = terms.per_square * (700 + 128)
    assert found.prefill_per_token == pytest.approx(step + 5e-6 + attention, rel=0.05)
    assert terms.constant < found.prefill_fixed < terms.constant + terms.per_column
    assert found.mixed_per_token(0.0) == pytest.approx(found.prefill_per_token, rel=0.05)
    whole = cost.seconds(mean_prompts(8 * 700, 700.0))
    assert found.prefill_fixed + found.prefill_per_token * 5600 == pytest.approx(whole, rel=0.03)


def test_one_slot():
    found = nearest_costs(load_card(ADA).cost, Lengths(90.0, 20.0), 1)
    assert found.decode_per_request == 0
    assert found.decode_fixed == load_card(ADA).cost.seconds(Shape(1, 100))


def test_mean_prompts():
    assert mean_prompts(1000, 300.4) == Shape(prefill=1000, chunks=(Chunk(0, 300),) * 3 + (Chunk(0, 100),))
    assert mean_prompts(0.2, 300.0) == Shape(prefill=1, chunks=(Chunk(0, 1),))


@pytest.mark.parametrize(("name", "settings"), [("mixed", {}), ("eb", {"refill": 6})])
def test_predictions_are_near_simulations(name, settings):
    engine, lengths = card_engine(ADA, 64, 8192), Lengths(500.0, 99.0)
    workload = generate(640, prompt=Uniform(500), output=Geometric(100), clients=128)
    run = simulate(engine, make_policy(name, settings, engine)[0], workload)
    if name == "mixed":
        predicted = mixed_rate(engine.cost, lengths, 64, 8192)
    else:
        predicted = exclusive_rate(engine.cost, lengths, 64, 6 / 64, 8192)
    assert summarise(run).request_rate.value == pytest.approx(predicted, rel=0.1)


def test_a_linear_cost_does_not_care_how_tokens_are_cut():
    assert LINES.seconds(mean_prompts(900, 300.0)) == LINES.seconds(Shape(prefill=900))


@pytest.mark.parametrize("card", [ADA, "derived-h200-qwen3-8b"])
@pytest.mark.parametrize("name", list(BATCH))
def test_every_policy_runs_on_a_tile_card(card, name):
    engine = card_engine(card, 32, 1024)
    settings = {"refill": 4} if name == "eb" else {}
    settings |= {"review": 10} if name in ("eb+", "eb-online") else {}
    workload = generate(60, arrivals=Poisson(4.0), prompt=Uniform(400), output=Uniform(40))
    run = simulate(engine, make_policy(name, settings, engine)[0], workload)
    assert run.completed().all()
