"""The worlds that are raced: workloads and engines by name, all from data that ship with the repository."""

from __future__ import annotations

from headgate.cost.card import load_card
from headgate.sim.engine.engine import Engine
from headgate.workloads.arrivals import Poisson
from headgate.workloads.lengths import Pairs, Uniform
from headgate.workloads.synthetic import generate
from headgate.workloads.traces import bundled
from headgate.workloads.workload import Workload


def engine(running: int = 512, budget: int = 16384) -> Engine:
    """The measured H200 card with so many slots."""
    card = load_card("linear-h200-qwen3-8b")
    return Engine(card.cost, card.kv_tokens, card.max_model_len, budget, running, card.block)


def conversations(requests: int, rate: float = 6.45) -> Workload:
    """Prompt and output pairs drawn from the bundled Azure slice, Poisson arrivals."""
    slice = bundled("azure-conv")
    return generate(requests, seed=0, arrivals=Poisson(rate), pairs=Pairs(slice.prompt, slice.output))


def saturated(requests: int, clients: int, prompt: float = 512, output: float = 512) -> Workload:
    """A closed loop, uniform lengths."""
    return generate(requests, seed=0, prompt=Uniform(prompt), output=Uniform(output), clients=clients)
