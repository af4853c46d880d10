"""Random parameters for RAD, Sarathi, SLAI and others in the small worlds of the tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from headgate.core.policy import BatchPolicy
from headgate.cost.model import StepCost
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine


def draw_rad(draw: st.DrawFn, name: str, slots: int) -> BatchPolicy:
    """Tiles of a few tokens, cycles of a few prompts."""
    tile = draw(st.integers(1, 4), label="tile")
    words: dict[str, Any] = {"tile": tile, "chunk": tile * draw(st.integers(1, 8), label="tiles")}
    words["cycle"] = draw(st.none() | st.integers(slots, slots + 9), label="cycle")
    words["output"] = draw(st.sampled_from([1.0, 20.0, 200.0]), label="output")
    if name == "rad-smooth":
        words["hold_first_token"] = draw(st.booleans(), label="hold_first_token")
    return BATCH[name](slots=slots, **words)


def draw_ordered(draw: st.DrawFn, name: str, slots: int, engine: Engine, cost: StepCost) -> BatchPolicy:
    """Prompts in an order of the policy's own; promises of a few steps."""
    words: dict[str, Any] = {"watermark": draw(st.sampled_from([0.0, 0.01, 0.3]), label="watermark")}
    budget = draw(st.integers(max(2, slots), engine.batch_tokens + slots + 1), label="budget")
    words["ageing"] = draw(st.sampled_from([0.0, 1.0]), label="ageing")
    if name == "sarathi":
        words["order"] = draw(st.sampled_from(["arrival", "shortest", "priority", "fair"]))
    if name != "slai":
        return BATCH[name](slots=slots, budget=budget, **words)
    words["order"] = draw(st.sampled_from(["arrival", "shortest", "priority", "deadline", "fair"]))
    words["decodes"] = draw(st.none() | st.integers(1, budget - 1), label="decodes")
    words["between_tokens"] = draw(st.sampled_from([0.7, 4.0, 15.0, 60.0]), label="between_tokens")
    words["first_token"] = draw(st.sampled_from([3.0, 50.0]), label="first_token")
    words["pace"] = draw(st.sampled_from(["predicted", "average", "recent"]))
    words["offset"] = draw(st.sampled_from([None, 0.0, 2.0, 10.0]), label="offset")
    words["relaxed"] = draw(st.sampled_from([0.2, 0.5]), label="relaxed")
    words["shrink"] = draw(st.booleans(), label="shrink")
    return BATCH[name](slots=slots, budget=budget, cost=cost, crowded=0.5, **words)


def draw_keep(draw: st.DrawFn, slots: int, engine: Engine, cost: StepCost) -> BatchPolicy:
    """Promises of a few steps, impossible ones, one of the two, or none (then it is eb+)."""
    words: dict[str, Any] = {"ttft": draw(st.sampled_from([None, 0.5, 6.0, 60.0]), label="ttft")}
    words["tbt"] = draw(st.sampled_from([None, 0.7, 4.0, 15.0]), label="tbt")
    words["patience"] = draw(st.sampled_from([0.0, 0.1, 0.9]), label="patience")
    words["watermark"] = draw(st.sampled_from([0.0, 0.01, 0.3]), label="watermark")
    words["late"] = draw(st.sampled_from([0.01, 0.2]), label="late")
    budget = draw(st.integers(slots, engine.batch_tokens + slots), label="budget")
    return BATCH["keep"](slots=slots, budget=budget, cost=cost, **words)


def draw_sglang(draw: st.DrawFn, engine: Engine) -> BatchPolicy:
    """Pieces below a page, intervals and delays of a few steps, estimates from none to all of the output."""
    slots = draw(st.integers(1, engine.running + 2), label="slots")
    words: dict[str, Any] = {"mixed_chunk": draw(st.booleans(), label="mixed_chunk")}
    words["max_prefill_tokens"] = draw(st.sampled_from([1, 40, 16384]), label="max_prefill_tokens")
    words["min_free_slots_delay"] = draw(st.integers(0, slots + 1), label="min_free_slots_delay")
    words["prefill_decode_interval"] = draw(st.sampled_from([0, 0, 1, 5]), label="prefill_decode_interval")
    words["interval_min_bs"] = draw(st.integers(0, 3), label="interval_min_bs")
    words["conservativeness"] = draw(st.sampled_from([0.01, 0.3, 1.0, 2.0]), label="conservativeness")
    words["clip"] = draw(st.sampled_from([1, 20, 4096]), label="clip")
    words["order"] = draw(st.sampled_from(["fcfs", "lpm"]), label="order")
    budget = draw(st.integers(1, engine.batch_tokens + slots), label="budget")
    return BATCH["sglang"](slots=slots, budget=budget, **words)


PACED = ("keep", "ppas", "prefill-interval", "fairbatching", "qoserve")


def draw_paced(draw: st.DrawFn, name: str, slots: int, engine: Engine, cost: StepCost) -> BatchPolicy:
    """Caps of a few tokens, intervals of a few steps; promises of a few steps, or impossible ones."""
    if name == "keep":
        return draw_keep(draw, slots, engine, cost)
    if name in ("fairbatching", "qoserve"):
        return draw_slack(draw, name, slots, engine, cost)
    words: dict[str, Any] = {"order": draw(st.sampled_from(["arrival", "shortest", "vtc"]), label="order")}
    if name == "ppas":
        words["cap"] = draw(st.sampled_from([1, 7, 40]), label="cap")
        words["prompts"] = draw(st.integers(1, 3), label="prompts")
    else:
        words["interval"] = draw(st.integers(1, 5), label="interval")
    budget = draw(st.integers(slots, engine.batch_tokens + slots), label="budget")
    return BATCH[name](slots=slots, budget=budget, **words)


def draw_slack(draw: st.DrawFn, name: str, slots: int, engine: Engine, cost: StepCost) -> BatchPolicy:
    words: dict[str, Any] = {"ttft": draw(st.sampled_from([0.5, 6.0, 60.0]), label="ttft")}
    words["tbt"] = draw(st.sampled_from([0.7, 4.0, 15.0]), label="tbt")
    words["trust"] = draw(st.sampled_from([0.5, 1.0]), label="trust")
    words["ahead"] = draw(st.booleans(), label="ahead")
    if name == "fairbatching":
        words["hold"] = draw(st.booleans(), label="hold")
        words["order"] = draw(st.sampled_from(["arrival", "shortest", "deadline", "vtc"]), label="order")
    else:
        words["alpha"] = draw(st.sampled_from([0.0, 0.008, 0.5]), label="alpha")
        words["relegate"] = draw(st.booleans(), label="relegate")
    budget = draw(st.integers(slots, engine.batch_tokens + slots), label="budget")
    return BATCH[name](slots=slots, budget=budget, cost=cost, **words)
