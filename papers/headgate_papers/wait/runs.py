"""Runs of the WAIT paper's workloads: Poisson arrivals up to a horizon, measured in the middle of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import nan
from typing import Any, NamedTuple

import numpy as np

from headgate.experiment.library import simulate
from headgate.methods.make import make_policy
from headgate.methods.wait.inventory import Lines, MixPart, lines_of
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.workloads.streams import stream
from headgate.workloads.workload import Kind, Workload
from headgate_papers.kv_linear import kv_linear
from headgate_papers.serving import Key
from headgate_papers.wait.balance import kv_work
from headgate_papers.wait.segments import Segments, check_ends

WINDOW = (0.3, 0.8)  # of the horizon: what is measured
NO_LIMIT = 1_000_000
BUDGET = 4096  # new tokens in a step of the Sarathi-like baselines
BUDGETED = ("mixed", "sarathi", "look-ahead")
FOR_EVER = {"max_pause": 1e9, "max_wait": 1e9}  # patience that never ends, as in the paper


class Machine(NamedTuple):
    """An engine of the paper's law: seconds d0, per KV token d1, per new token d2; KV tokens; slots."""

    fixed: float = 0.008
    per_kv: float = 3e-7
    per_new: float = 0.0
    kv: int = 100_000
    slots: int = NO_LIMIT

    def engine(self) -> Engine:
        """The same as the simulator wants it; KV is counted in tokens, steps have no token limit."""
        return Engine(_cost(*self[:3]), self.kv, NO_LIMIT, NO_LIMIT, self.slots, block=1)

    def lines(self, parts: list[MixPart]) -> Lines:
        """The same as planners want it."""
        return lines_of(_cost(*self[:3]), parts, self.kv)


@lru_cache(maxsize=16)
def _cost(fixed: float, per_kv: float, per_new: float) -> Any:
    return kv_linear(fixed, per_kv, per_new)


def kind(rate: float, prompt: int, decodes: int, block: int = 1) -> MixPart:
    """A type whose requests are all alike."""
    most = -(-(prompt + decodes) // block) * block
    return MixPart(rate, prompt, decodes, kv_work(prompt, decodes, block), most)


class Mix(NamedTuple):
    """Types of requests (rate, prompt, decode iterations); `spread`: lengths in (l' - spread, l'] instead."""

    types: tuple[tuple[float, int, int], ...]
    spread: int = 1
    free_prompts: bool = False  # exponential prompts of that mean

    @property
    def parts(self) -> list[MixPart]:
        return [kind(rate, prompt, decodes) for rate, prompt, decodes in self.types]

    def times(self, factor: float) -> Mix:
        """The same at another rate."""
        return self._replace(
            types=tuple((rate * factor, prompt, decodes) for rate, prompt, decodes in self.types)
        )


class WaitJob(NamedTuple):
    """One run: the mix for so many seconds under a policy."""

    key: Key
    machine: Machine
    mix: Mix
    seconds: float
    policy: str
    settings: Mapping[str, Any]
    lost: int = 0  # output tokens that an evicted request loses


@dataclass(frozen=True)
class Served:
    """The figures of one run, of requests that finished in the window."""

    decodes: float  # decode tokens per second: output tokens less the one that comes with the prompt
    requests: float  # per second
    latency: float  # mean, s
    p95: float
    ttft: float  # mean, to the token that comes with the prompt
    tpot: float  # mean, s
    peak: float  # most KV tokens held at the end of any step
    evictions: float
    completed: float  # of those who came in the window, the share that finished before the horizon
    shares: tuple[float, ...]  # requests per second by type

    @classmethod
    def of(cls, run: Run, seconds: float, types: int) -> Served:
        table, done = run.requests, run.completed()
        low, high = (share * seconds for share in WINDOW)
        inside = done & (table["finished"] >= low) & (table["finished"] < high)
        came = (table["arrival"] >= low) & (table["arrival"] < high)
        rows = {
            name: table[name][inside] for name in ("arrival", "first_token", "finished", "output", "kind")
        }
        decodes, span = rows["output"] - 1, high - low
        latency = rows["finished"] - rows["arrival"]
        decoding = decodes > 0
        tpot = (rows["finished"] - rows["first_token"])[decoding] / decodes[decoding]
        none = not len(latency)
        return cls(
            decodes=float(decodes.sum()) / span,
            requests=len(latency) / span,
            latency=nan if none else float(latency.mean()),
            p95=nan if none else float(np.quantile(latency, 0.95)),
            ttft=nan if none else float((rows["first_token"] - rows["arrival"]).mean()),
            tpot=float(tpot.mean()) if len(tpot) else nan,
            peak=float(run.steps["kv"].max()),
            evictions=float(table["evictions"].sum()),
            completed=float(done[came].mean()) if came.any() else nan,
            shares=tuple(float((rows["kind"] == number).sum()) / span for number in range(types)),
        )


@lru_cache(maxsize=2)
def draw(mix: Mix, seconds: float, seed: int) -> Workload:
    """Everybody who comes before the horizon; whoever is still there then is sent home."""
    rate = sum(each[0] for each in mix.types)
    count = stream(seed, "count").poisson(rate * seconds)
    arrival = np.sort(stream(seed, "arrivals").random(count)) * seconds
    shares = np.array([each[0] for each in mix.types]) / rate
    types = stream(seed, "classes").choice(len(shares), size=count, p=shares)
    prompts = np.array([each[1] for each in mix.types])[types]
    if mix.free_prompts:
        prompts = np.ceil(stream(seed, "lengths.prompt").exponential(prompts)).astype(np.int64)
    decodes = np.array([each[2] for each in mix.types])[types]
    decodes = decodes - stream(seed, "lengths.output").integers(0, mix.spread, count)
    kinds = [Kind(str(number)) for number in range(len(shares))]
    return Workload.of(
        np.maximum(prompts, 1),
        decodes + 1,
        arrival=arrival,
        kind=types,
        kinds=kinds,
        abort=seconds - arrival,
        guess=decodes + 1,
    )


def serve(job: WaitJob, seed: int) -> Served:
    """One of them."""
    engine = job.machine.engine()
    settings = dict(job.settings)
    if job.policy in BUDGETED:
        engine = engine._replace(batch_tokens=max(BUDGET, engine.running))
        settings = {"budget": BUDGET, "slots": min(engine.running, BUDGET)} | settings
    policy, _ = make_policy(job.policy, settings, engine)
    run = simulate(engine, policy, draw(job.mix, job.seconds, seed), watchdog=1e12, lost=job.lost)
    return Served.of(run, job.seconds, len(job.mix.types))


def segments_of(
    prompt: float, types: Sequence[tuple[float, int]], ends: Sequence[int] | None = None
) -> Segments:
    """From types (rate, decode iterations); cut at their lengths unless `ends` says where."""
    cuts = tuple(sorted({length for _, length in types})) if ends is None else tuple(ends)
    check_ends(cuts)
    starts = (-1, *cuts[:-1])
    reach = tuple(sum(rate for rate, length in types if length > start) for start in starts)
    return Segments(prompt, cuts, reach)
