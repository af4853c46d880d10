"""Acceptance, the step law with drafts, and which k pays; known answers of the design."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.cost.card import load_card, parse_card
from headgate.cost.fit.fit import METHOD, fit, fit_drafts
from headgate.cost.fit.steps import About, StepTable
from headgate.cost.laws.speculation import Acceptance, MixedAcceptance, crossover, gain, schedule
from headgate.cost.laws.terms import DraftTerms, HostTerms
from headgate.cost.model import Chunk, Shape
from headgate.experiment.build import make_engine
from headgate.experiment.library import card_engine
from headgate.experiment.settings import experiment
from headgate.methods.bounds import Requests, engine_bound
from headgate.methods.make import make_policy
from headgate.sim.engine.engine import Speculation, speculate_settings

FREE = DraftTerms(3)  # a drafter that takes nothing
COST = load_card("cal-h200-qwen3-8b").cost.unhosted()


@pytest.mark.parametrize(
    "law, drafts, tokens",
    [
        (Acceptance(0.7), 3, 2.533),
        (Acceptance(0.65), 5, 2.6416603125),
        (Acceptance(1.0), 4, 5.0),
        (Acceptance(0.0), 4, 1.0),
        (Acceptance(5.7 / 7.5, 7.5), 8, 4.348994715),
    ],
)
def test_tokens_a_step(law, drafts, tokens):
    assert law.tokens(drafts) == pytest.approx(tokens, abs=1e-9)
    assert MixedAcceptance(((0.25, law), (0.75, law))).tokens(drafts) == pytest.approx(tokens, abs=1e-9)


def fitted(rates):
    """The law closest to acceptance by position. Rates weigh requests by steps: rejected ones count more."""
    measured = np.asarray(rates, dtype=np.float64)
    means = np.linspace(0.01, 0.99, 197)[:, None, None]
    spreads = np.append(np.geomspace(0.5, 500, 121), 1e9)[None, :, None]
    place = np.arange(len(measured))[None, None, :]
    off = np.square(np.cumprod((means * spreads + place) / (spreads + place), axis=2) - measured)
    mean, spread = np.unravel_index(int(off.sum(axis=2).argmin()), off.shape[:2])
    found = float(spreads[0, spread, 0])
    return Acceptance(round(float(means[mean, 0, 0]), 6), inf if found > 500 else found)


def test_a_law_is_found_again():
    law = Acceptance(0.76, 7.5)
    found = fitted(law.rates(8))
    assert found.mean == pytest.approx(0.76, abs=0.006)
    assert found.spread == pytest.approx(7.5, rel=0.1)
    alike = fitted(Acceptance(0.6).rates(5))
    assert (alike.mean, alike.spread) == (pytest.approx(0.6, abs=0.006), inf)
    published = fitted([0.7568, 0.6011, 0.4976, 0.4113, 0.3538, 0.2980, 0.2608, 0.2229])
    assert published.tokens(8) == pytest.approx(4.40, abs=0.02)  # vLLM #48892, MTP-8, gsm8k


@pytest.mark.parametrize("decodes, ratio", [(32, 1.0), (64, 1.3602), (128, 1.8154), (256, 1.9252)])
def test_verification_on_the_h200_card(decodes, ratio):
    found = gain(COST, FREE, Acceptance(0.7), decodes, 1000, 3)
    assert found.tokens / found.gain == pytest.approx(ratio, abs=5e-5)


def test_crossover_on_the_h200_card():
    law = Acceptance(0.7)
    assert crossover(COST, FREE, law, 300, 3) == 461
    assert crossover(COST, FREE, law, 460, 3) is None


def test_experts_gain_with_the_batch_and_dense_models_lose():
    law, drafting = Acceptance(0.7), DraftTerms(3, 0.28e-3)
    dense = load_card("derived:qwen3-8b@h200").cost.unhosted()
    experts = load_card("derived:qwen3-30b-a3b@h200").cost.unhosted()
    small, large = (gain(dense, drafting, law, size, 1000, 3).gain for size in (4, 256))
    assert small > large
    small, large = (gain(experts, drafting, law, size, 1000, 3).gain for size in (4, 64))
    assert small < large


def test_schedule_covers_every_batch_and_is_nearly_the_best():
    law, drafting = Acceptance(0.7), DraftTerms(5, 0.35e-3, 2e-6)
    ranges = schedule(COST, drafting, law, 1000, 5, 300)
    assert ranges[0][0] == 1
    assert ranges[-1][1] == 300
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))
    k_of = {size: k for low, high, k in ranges for size in range(low, high + 1)}
    for size in (1, 8, 32, 100, 200, 300):
        most = max(gain(COST, drafting, law, size, 1000, k).gain for k in range(6))
        assert gain(COST, drafting, law, size, 1000, k_of[size]).gain > 0.93 * most


def test_a_step_with_drafts_is_the_sum_that_the_law_says():
    terms = DraftTerms(3, 0.35e-3, 2e-6, 1e-3)
    cost, shape = COST.speculating(terms), Shape(10, 5000, 100, 0, (Chunk(0, 100),))
    alone = COST.speculating(None)
    layers = alone.layers(10 * 4 + 100) - alone.layers(10 + 100)
    drafts = 3 * (0.35e-3 + 2e-6 * 10) + 1e-3
    assert cost.seconds(shape) == pytest.approx(alone.seconds(shape) + layers + drafts)
    only_prompts = Shape(0, 0, 100, 0, (Chunk(0, 100),))
    assert cost.seconds(only_prompts) == alone.seconds(only_prompts)
    assert cost != alone
    assert "DraftTerms" in repr(cost)
    assert repr(alone) == repr(COST)


def test_decodes_with_drafts_may_not_fit_the_graph():
    host = HostTerms(0.1, ungraphed=2.0, prompts=0.5, graph=100)
    assert host.seconds(Shape(50)) == host.seconds(Shape(50), 1) == 0.1
    assert host.seconds(Shape(50), 2) == 0.1
    assert host.seconds(Shape(50), 3) == 2.1


def test_a_card_keeps_what_drafts_take():
    card = load_card("cal-h200-qwen3-8b")
    assert "speculation" not in card.text()
    measured = card.model_copy(update={"speculation": DraftTerms(3, 0.4e-3, 1e-6, 0.1e-3, "mtp")})
    again = parse_card(measured.text(), "again")
    assert again.speculation == measured.speculation
    engine = make_engine(experiment({"speculate": "2:accept=0.6"}), again)
    assert engine.cost.drafting == replace(again.speculation, drafts=2)
    assert engine.speculation.ahead == 2
    with pytest.raises(InputError, match="measured up to 3 drafts"):
        make_engine(experiment({"speculate": "4:accept=0.6"}), again)


def test_a_bound_counts_steps():
    plain, fast = (card_engine("cal-h200-qwen3-8b", speculate=text) for text in (None, "3:accept=1,draft=0"))
    lengths = Requests.of([100.0], [400.0])
    limits = plain.running, plain.batch_tokens, plain.kv_tokens
    slow = engine_bound(plain.cost, lengths, *limits)
    quick = engine_bound(fast.cost, lengths.in_steps(fast.burst), *limits)
    assert fast.burst == 4
    assert slow.rate < quick.rate < 4.5 * slow.rate
    assert lengths.in_steps(1.0) is lengths


@pytest.mark.parametrize(
    "text, fault",
    [
        ("many", "expect a number of drafts"),
        ("33", "expect a number of drafts"),
        ("3:accept=2", "expect a number from 0 to 1"),
        ("3:spread=0", "spread is '0'"),
        ("3:accept=x", "accept is 'x'"),
        ("3:accepted=0.5", "did you mean 'accept'"),
        ("3:accept=0.5,accept=0.6", "given twice"),
    ],
)
def test_what_speculate_refuses(text, fault):
    with pytest.raises(InputError, match=fault):
        speculate_settings(text)


@pytest.mark.parametrize(
    "words, fault",
    [
        ({"speculate": "3"}, "needs the share of drafts"),
        ({"speculate": "3:accept=0.7", "card": "linear-h200-qwen3-8b"}, "prices decodes, not tokens"),
        ({"speculate": "31:accept=0.7", "budget": 2048}, "raise --budget"),
        ({"speculate": "3:accept=0.7,method=magic"}, "method must be one of"),
        ({"speculate": "3:accept=0.7", "engine": "sglang"}, "as vLLM runs them"),
    ],
)
def test_what_an_engine_refuses(words, fault):
    settings = experiment(words)
    with pytest.raises(InputError, match=fault):
        make_engine(settings, load_card(settings.card))


def test_what_drafts_take_is_found_again(tmp_path):
    """Steps with 0, 1 and 4 drafts by a known law, with noise: its three numbers come back."""
    chance = np.random.default_rng(3)
    true = DraftTerms(4, 0.4e-3, 3e-6, 0.8e-3, "mtp")
    rows = []
    for k in (0, 1, 4):
        cost = COST.speculating(replace(true, drafts=k) if k else None)
        for decodes in (1, 8, 32, 64, 128, 200, 256):
            for context in (200, 800, 2000):
                shape = Shape(decodes, decodes * context)
                for _ in range(12):
                    noisy = cost.seconds(shape) * float(chance.normal(1.0, 0.002))
                    rows.append((noisy, decodes, decodes * context, 0, k * decodes, len(rows) // 36))
    names = ("seconds", "decodes", "context", "prefill", "drafts", "part")
    columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    labels = [str(part) for part in range(int(columns["part"].max()) + 1)]
    table = StepTable.from_columns(columns, labels)
    table.save(tmp_path / "steps.npz")
    assert StepTable.load(tmp_path / "steps.npz").drafts.tolist() == table.drafts.tolist()
    found = fit_drafts(table.take(table.drafts > 0), COST.terms, "mtp")
    assert found is not None
    assert (found.drafts, found.method) == (4, "mtp")
    assert found.draft == pytest.approx(true.draft, rel=0.1)
    assert found.draft_per_decode == pytest.approx(true.draft_per_decode, rel=0.1)
    assert found.speculating == pytest.approx(true.speculating, rel=0.1)
    about = About("made-up", "GPU", "model", 10_000, 4096, 256, 8192, settings={METHOD: "mtp"})
    card = fit(table, about).card()
    assert card.speculation is not None
    assert card.speculation.drafts == 4
    shape = Shape(100, 80_000)
    priced = card.cost.speculating(card.speculation).seconds(shape)
    assert priced == pytest.approx(COST.speculating(true).seconds(shape), rel=0.03)
    plain = StepTable.from_columns({name: columns[name][columns["drafts"] == 0] for name in names[:4]})
    plain.save(tmp_path / "plain.npz")
    with np.load(tmp_path / "plain.npz") as stored:
        assert "drafts" not in stored
    assert fit_drafts(plain.take(plain.drafts > 0), COST.terms) is None
    with pytest.raises(InputError, match="timed steps with drafts"):
        fit_drafts(table.take(table.drafts > 0).take(np.arange(5)), COST.terms)


def test_a_policys_budget_must_hold_the_drafts():
    engine = card_engine("cal-h200-qwen3-8b", slots=64, speculate="3:accept=0.7")
    for name in ("mixed", "eb+", "slai", "keep"):
        with pytest.raises(InputError, match="below 64 slots of 4 tokens each"):
            make_policy(name, {"budget": 255}, engine)
        make_policy(name, {"budget": 256}, engine)
    make_policy("mixed", {"budget": 255, "slots": 63}, engine)
    with pytest.raises(InputError, match="as vLLM runs them"):
        make_policy("sglang", {}, engine)


def test_classes_without_a_law_have_the_common_one():
    named = (("chat", Acceptance(0.2)),)
    assert Speculation(3, Acceptance(0.7), classes=named).burst == pytest.approx(2.533)
    assert Speculation(3, Acceptance(0.0), classes=named).burst == Acceptance(0.2).tokens(3)


def test_a_fit_needs_steps_without_drafts():
    rows = np.arange(200)
    columns = {"seconds": 0.01 + rows * 1e-5, "decodes": 1 + rows % 20, "context": rows * 50.0}
    table = StepTable.from_columns({**columns, "prefill": rows * 0, "drafts": 3 * (1 + rows % 20)})
    with pytest.raises(InputError, match=r"200 of 200 timed steps verified drafts; .* without speculation"):
        fit(table, About("made-up", "GPU", "model", 10_000, 4096, 256, 8192))


def test_prompts_that_a_drafter_computes_do_not_make_the_card_dearer():
    """A third more for prompts in the engine with a drafter: the law of prompts is the plain engine's."""
    true = DraftTerms(3, 0.4e-3, 3e-6, 0.8e-3)
    rows = []
    for part in range(24):
        k = 3 if part % 2 else 0
        cost = COST.speculating(true if k else None)
        for decodes, prefill in ((1 + 8 * part, 0),) * 4 + ((0, 200 * part + 64),) * 2 + ((16, 512),) * 2:
            shape = Shape(decodes, decodes * 700, prefill)
            dearer = 1.3 if k and prefill else 1.0
            rows.append((dearer * cost.seconds(shape), decodes, decodes * 700, prefill, k * decodes, part))
    names = ("seconds", "decodes", "context", "prefill", "drafts", "part")
    columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    columns |= {"prompts": (columns["prefill"] > 0) * 1.0, "attention": columns["prefill"] ** 2 / 2}
    table = StepTable.from_columns(columns, [str(part) for part in range(24)])
    card = fit(table, About("made-up", "GPU", "model", 10_000, 4096, 256, 8192)).card()
    for shape in (Shape(0, 0, 2048), Shape(32, 32 * 700, 1024)):
        assert card.cost.seconds(shape) == pytest.approx(COST.seconds(shape), rel=0.05)
    alone = Shape(100, 70_000)
    priced = card.cost.speculating(card.speculation).seconds(alone)
    assert priced == pytest.approx(COST.speculating(true).seconds(alone), rel=0.05)
