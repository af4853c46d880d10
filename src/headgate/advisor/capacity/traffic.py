"""The traffic of a capacity search: the same requests at any rate, drawn or as recorded, with classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from headgate.advisor.capacity.slo import Level, promise
from headgate.core.errors import InputError
from headgate.experiment.build import make_workload, refuse_many
from headgate.experiment.settings import Experiment
from headgate.experiment.unservable import ALL_FIT, Unservable, servable, unservable
from headgate.methods.bounds.capacity import Requests
from headgate.sim.engine.engine import Engine
from headgate.workloads.arrivals import arrival_process
from headgate.workloads.lengths import Pairs
from headgate.workloads.reuse import found_again
from headgate.workloads.streams import stream
from headgate.workloads.synthetic import PAIRS, generate
from headgate.workloads.workload import Kind, Workload

REFUSED = {
    "rate": "is what is searched for",
    "clients": "is another kind of load",
    "all_at_once": "is another kind of load",
    "scale_rate": "is what is searched for",
    "stages": "change the load",
    "patience": "lets requests leave, which hides that they were late",
    "abort": "lets requests leave, which hides that they were late",
    "ttft": "belongs into --slo",
    "tpot": "belongs into --slo",
}
BOUND_FROM = 20_000  # requests drawn to know their law


@dataclass(frozen=True)
class Traffic:
    """Requests at any rate and seed. `trace` holds the rows to draw from (or to replay); None: laws."""

    words: Experiment
    levels: tuple[Level, ...]
    classes: tuple[tuple[str, float], ...]
    requests: int
    trace: Workload | None
    recorded: bool  # the trace's own times, only faster or slower
    lost: Unservable = ALL_FIT

    @property
    def drawn(self) -> bool:
        """Whether anything depends on the seed."""
        return not self.recorded or bool(self.classes)

    def at(self, rate: float, seed: int) -> Workload:
        """The requests at so many per second."""
        if self.trace is None:
            words = self.words.model_copy(update={"rate": rate, "requests": self.requests})
            found, _ = make_workload(words, seed)
        elif self.recorded:
            found = self.trace.scale_rate(rate / own_rate(self.trace))
        else:
            found = self._resampled(self.trace, rate, seed)
        return self._promised(self._classed(found, seed))

    def lengths(self, engine: Engine) -> Requests:
        """Prompts and decode iterations of those that the engine takes."""
        found = self.trace or self.at(1.0, self.words.seed)
        if self.trace is None and self.requests < BOUND_FROM:
            found = replace(self, requests=BOUND_FROM).at(1.0, self.words.seed)
        fits = found.prompt < engine.longest
        outputs = np.minimum(np.minimum(found.output, found.limit), engine.longest - found.prompt)[fits]
        prompts = found.prompt
        if engine.prefix_cache and not (self.trace and not self.recorded):  # drawn rows share nothing
            prompts = prompts - found_again(found, engine.block)  # no cache finds more than an endless one
        return Requests.of(prompts[fits], outputs - 1)

    def sharing_said(self, engine: Engine) -> str:
        """Whether prompts are found in the prefix cache; empty where none share anything."""
        found = self.trace if self.trace is not None else self.at(1.0, self.words.seed)
        if not engine.prefix_cache or (found.contents is None and not found.cached.any()):
            return ""
        if self.trace is not None and not self.recorded:
            return "rows drawn from the trace share nothing: no prompt is found in a cache; see --as-recorded"
        share = found_again(found, engine.block).sum() / found.prompt.sum()
        if found.contents is None:
            return f"prefix caching is on: {share:.1%} of the prompt tokens are found, as recorded"
        return f"prefix caching is on: an endless cache would find {share:.1%} of the prompt tokens"

    def _resampled(self, trace: Workload, rate: float, seed: int) -> Workload:
        name = self.words.arrivals or ("gamma" if self.words.burstiness else "poisson")
        process = arrival_process(name, rate, self.words.burstiness)
        pairs = Pairs(trace.prompt, np.minimum(trace.output, trace.limit))
        found = generate(self.requests, seed=seed, arrivals=process, pairs=pairs, name=trace.name)
        if len(trace.kinds) == 1 or self.classes:
            return found
        drawn = pairs.rows(self.requests, stream(seed, PAIRS))  # the same rows, for their classes
        return replace(found, kind=trace.kind[drawn], kinds=trace.kinds, priority=trace.priority[drawn])

    def _classed(self, found: Workload, seed: int) -> Workload:
        """Each request gets a class at random, by the shares."""
        if not self.classes:
            return found
        shares = np.cumsum([share for _, share in self.classes])
        draws = stream(seed, "classes").random(len(found)) * shares[-1]
        kind = np.searchsorted(shares[:-1], draws, side="right")
        kinds = tuple(Kind(name, priority=place) for place, (name, _) in enumerate(self.classes))
        return replace(found, kind=kind, kinds=kinds, priority=kind.astype(np.int64))

    def _promised(self, found: Workload) -> Workload:
        kinds = tuple(kind._replace(slo=promise(self.levels, kind.name, kind.slo)) for kind in found.kinds)
        return replace(found, kinds=kinds)


def make_traffic(
    words: Experiment,
    levels: tuple[Level, ...],
    classes: str | None,
    requests: int,
    recorded: bool,
    engine: Engine,
) -> Traffic:
    """Checked: nothing that sets the load, every class of a level known, somebody fits."""
    for word, why in REFUSED.items():
        if word in words.model_fields_set and getattr(words, word):
            flag = "[[stages]]" if word == "stages" else "--" + word.replace("_", "-")
            raise InputError(f"in a capacity search {flag} {why}; drop it")
    if words.arrivals == "all-at-once":
        raise InputError(
            "--arrivals all-at-once has no rate to search for; choose poisson, gamma or constant"
        )
    refuse_many(words.requests or 0)
    trace, lost = None, ALL_FIT
    if words.trace is not None:
        own = words.requests if recorded else None
        plain = words.model_copy(update={"arrivals": None, "burstiness": None, "requests": own})
        trace, _ = make_workload(plain)
        trace, lost = servable(trace, engine), unservable(trace, engine)
    if recorded:
        _check_recorded(words, trace)
    shares = parse_classes(classes)
    if shares and words.classes:
        raise InputError("--classes and the classes of a mix; drop one of the two")
    count = len(trace) if recorded and trace is not None else words.requests or requests
    found = Traffic(words, levels, shares, count, trace, recorded, lost)
    first = found.at(1.0, words.seed)
    _check_kinds(levels, [kind.name for kind in first.kinds])
    return found if trace else replace(found, lost=unservable(first, engine))


def parse_classes(text: str | None) -> tuple[tuple[str, float], ...]:
    """`paying=5%,free=95%` as names and shares; the shares are taken relative to their sum."""
    found: list[tuple[str, float]] = []
    for part in (text or "").split(",") if text is not None else ():
        name, equals, share = part.strip().partition("=")
        try:
            value = float(share.removesuffix("%"))
        except ValueError:
            value = 0.0
        if not (equals and name and value > 0 and isfinite(value)):
            raise InputError(f"--classes {part.strip()!r} is not NAME=SHARE; write paying=5%,free=95%")
        if name in dict(found):
            raise InputError(f"--classes names {name!r} twice; drop one of the two")
        found.append((name, value))
    return tuple(found)


def _check_recorded(words: Experiment, trace: Workload | None) -> None:
    if trace is None:
        raise InputError("--as-recorded is about traces; give --trace FILE or drop it")
    if words.arrivals or words.burstiness:
        raise InputError(
            "--as-recorded keeps the trace's times, --arrivals replaces them; drop one of the two"
        )
    own_rate(trace)


def own_rate(trace: Workload, remedy: str = "drop --as-recorded") -> float:
    """Requests per second of a trace as recorded."""
    span = float(trace.arrival[-1] - trace.arrival[0])
    if not span > 0:
        raise InputError(f"the trace has no arrival times, or only one, so its rate is unknown; {remedy}")
    return (len(trace) - 1) / span


def _check_kinds(levels: Sequence[Level], names: Sequence[str]) -> None:
    for level in levels:
        if level.kind and level.kind not in names:
            known = ", ".join(name for name in names if name)
            draw = "name a class column (--columns class=NAME), or draw classes: --classes paying=5%,free=95%"
            remedy = f"choose from: {known}" if known else draw
            raise InputError(f"--slo is about class {level.kind!r}, which no request belongs to; {remedy}")
