"""Classes of requests as flows through one engine of a fleet: their sizes, speeds and prices.

Symbols of arXiv 2602.02987 stand in comments; everything is per engine, so a fleet of n engines meets n
times these rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite

from headgate.core.errors import InputError
from headgate.cost.model import Shape, StepCost

BUNDLED, SEPARATE = "bundled", "separate"


@dataclass(frozen=True, slots=True)
class Flow:
    name: str
    prompt: float  # P, mean tokens
    output: float  # D, mean tokens
    rate: float  # λ, arrivals per second and engine
    impatience: float = 0.0  # θ, 1 / mean patience of waiting requests; 0: none gives up
    cached: float = 0.0  # of P, mean tokens that engines find in their prefix caches; they are paid for

    @property
    def computed(self) -> float:
        return self.prompt - self.cached


@dataclass(frozen=True, slots=True)
class EnginePace:
    """How fast one engine works, equations (1) to (4).

    Steps that hold a chunk of a prompt last `mixed_fixed + chunk * mixed_per_token`, steps without one
    `1 / solo_speed`, however many decodes they hold. `whole_chunks`, ours, counts the chunks of a mean prompt
    instead of its tokens.
    """

    slots: int  # B, requests of any kind at once
    chunk: int  # C, prompt tokens in a mixed step
    mixed_fixed: float  # α
    mixed_per_token: float  # β
    solo_speed: float  # γ, tokens per second and slot
    whole_chunks: bool = False

    @property
    def mixed_step(self) -> float:
        return self.mixed_fixed + self.mixed_per_token * self.chunk

    @property
    def ratio(self) -> float:
        """κ, how much faster a decode is without a prompt beside it."""
        return self.solo_speed * self.mixed_step

    @property
    def keeps_up(self) -> bool:
        """Proposition 1: then the best bundled plan has no queue for decode slots."""
        return self.slots * self.ratio >= self.slots - 1

    def prefill_seconds(self, flow: Flow) -> float:
        """1/μ_p, the time one prompt keeps an engine mixed."""
        if not self.whole_chunks:
            return flow.computed * self.mixed_step / self.chunk
        chunks = ceil(flow.computed / self.chunk)
        per_chunk = self.mixed_step - self.mixed_per_token * self.chunk
        return per_chunk * chunks + self.mixed_per_token * flow.computed

    def decode_weight(self, flow: Flow) -> float:
        """D + ωP: decode tokens of capacity that one request takes, its prompt's share included."""
        displaced = self.slots * self.solo_speed - (self.slots - 1) / self.mixed_step
        return flow.output + displaced * self.prefill_seconds(flow)


@dataclass(frozen=True, slots=True)
class TokenPrices:
    prompt: float  # c_p
    output: float  # c_d

    def value(self, flow: Flow) -> float:
        """w, of one request served to its end (21)."""
        return self.prompt * flow.prompt + self.output * flow.output


@dataclass(frozen=True, slots=True)
class Instance:
    flows: tuple[Flow, ...]
    pace: EnginePace
    prices: TokenPrices
    charging: str = BUNDLED  # paid for requests that finish (22), or SEPARATE: for each stage (23)

    def checked(self) -> Instance:
        if not self.flows:
            raise InputError("no class of requests; give at least one")
        names = [flow.name for flow in self.flows]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"class {twice!r} is given twice; names must differ")
        for flow in self.flows:
            _check_flow(flow)
        if not any(flow.rate for flow in self.flows):
            raise InputError("no class has arrivals; give at least one a rate above 0")
        _check_pace(self.pace)
        for name, price in (("prompt", self.prices.prompt), ("output", self.prices.output)):
            _need(price >= 0 and isfinite(price), f"the price of a {name} token is {price:g}", "at least 0")
        _need(self.prices.prompt + self.prices.output > 0, "both prices are 0", "one above 0")
        return self

    def seconds(self) -> list[float]:
        return [self.pace.prefill_seconds(flow) for flow in self.flows]

    def values(self) -> list[float]:
        return [self.prices.value(flow) for flow in self.flows]

    def by_density(self) -> list[str]:
        """The most value per decode token of capacity first, w / (D + ωP): the order of a knapsack."""
        weigh, value = self.pace.decode_weight, self.prices.value
        return [flow.name for flow in sorted(self.flows, key=lambda flow: -value(flow) / weigh(flow))]


def _check_flow(flow: Flow) -> None:
    about = f"class {flow.name!r}: "
    for name in ("prompt", "output"):
        tokens = getattr(flow, name)
        _need(tokens > 0 and isfinite(tokens), f"{about}{name} is {tokens:g} tokens", "more than 0")
    _need(
        0 <= flow.cached < flow.prompt,
        f"{about}{flow.cached:g} of {flow.prompt:g} prompt tokens are cached",
        "fewer than the prompt has",
    )
    _need(flow.rate >= 0 and isfinite(flow.rate), f"{about}rate is {flow.rate:g}", "at least 0")
    rate = flow.impatience
    _need(rate >= 0 and isfinite(rate), f"{about}impatience is {rate:g} per second", "at least 0")


def _check_pace(pace: EnginePace) -> None:
    _need(pace.slots >= 1, f"{pace.slots} slots per engine", "at least 1")
    _need(pace.chunk >= 1, f"a chunk of {pace.chunk} tokens", "at least 1")
    for name in ("mixed_fixed", "mixed_per_token"):
        seconds = getattr(pace, name)
        _need(seconds >= 0 and isfinite(seconds), f"{name} is {seconds:g} seconds", "at least 0")
    _need(pace.mixed_step > 0, "a mixed step takes no time", "a fixed part or a price per token above 0")
    speed = pace.solo_speed
    _need(speed > 0 and isfinite(speed), f"a decode alone makes {speed:g} tokens/s", "more than 0")


def _need(right: bool, what: str, wanted: str) -> None:
    if not right:
        raise InputError(f"{what}; give {wanted}")


def pace_of(cost: StepCost, slots: int, budget: int, prompt: float, context: float) -> EnginePace:
    """Steps with one mean prompt, and steps without.

    A mean prompt runs in one step if the budget allows, as in a token-level engine, not in small chunks.
    `slots` are decodes that run at once, as memory allows; each reads `context` KV tokens at a random moment.
    """
    if slots < 2:
        raise InputError(
            f"routers that plan need at least 2 slots per engine, one for a prompt beside a decode; here are "
            f"{slots}: raise --slots or --kv-tokens, or choose another router such as least-loaded"
        )
    chunk = max(1, min(budget - slots + 1, round(prompt)))
    fixed, slope = mixed_line(cost, slots - 1, context, chunk)
    alone = cost.seconds(Shape(slots, round(slots * context)))
    return EnginePace(slots, chunk, fixed, slope, 1 / alone)


def mixed_line(
    cost: StepCost, decodes: int, context: float, chunk: int, behind: int = 0
) -> tuple[float, float]:
    """Of a step with a chunk beside decodes: what it takes without the chunk, and for each token of it."""
    read, half = round(decodes * context), max(1, chunk // 2)
    whole, part = (cost.seconds(Shape(decodes, read, tokens, behind)) for tokens in (chunk, half))
    slope = (whole - part) / (chunk - half) if chunk > half else 0.0
    slope = min(max(slope, 0.0), whole / chunk)
    return max(whole - slope * chunk, 0.0), slope
