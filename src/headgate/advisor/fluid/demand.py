"""Classes of requests for a fluid plan: from flags, from an experiment file, or from a trace by clusters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from headgate.core.durations import duration
from headgate.core.errors import InputError, unknown
from headgate.experiment.build import DEFAULT_REQUESTS, make_workload
from headgate.experiment.conflicts import MAKE_LENGTHS, flag
from headgate.experiment.settings import Experiment
from headgate.experiment.unservable import ALL_FIT, Unservable, servable, unservable
from headgate.methods.fluid.flows import Flow
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload

Floats = NDArray[np.float64]
NUMBERS = ("prompt", "output", "rate")
OPTIONAL = ("patience", "cached")
DRAWN = 50_000  # requests drawn to know the means of length laws
ROUNDS = 60  # of the clustering
NOT_WITH_CLASSES = (*MAKE_LENGTHS, "classes", "stages", "trace", "rate", "clients", "requests")


@dataclass(frozen=True)
class Demand:
    """The classes, with rates of the whole fleet, and what their decodes read on average."""

    source: str
    flows: tuple[Flow, ...]
    context: float  # KV tokens a running decode reads, at a random moment
    notes: tuple[str, ...] = ()
    lost: Unservable = ALL_FIT


def demand(words: Experiment, classes: tuple[str, ...], clusters: int, engine: Engine | None) -> Demand:
    """From `--class` texts if there are any, else from the words of a run; of these what the engine takes."""
    if classes:
        not_with(words, "--class")
        flows = tuple(_flow(text, words.patience) for text in classes)
        return Demand("classes as given", flows, _context(flows))
    rate = _rate_known(words)
    workload, bad = make_workload(_enough(words))
    lost = ALL_FIT if engine is None else unservable(workload, engine)
    workload = workload if engine is None else servable(workload, engine)
    rate = rate or _own_rate(workload)
    notes = [*workload.remarks, *([f"left out {bad.count} bad rows"] if bad.count else [])]
    outputs = np.minimum(workload.output, workload.limit).astype(np.float64)
    prompts = workload.prompt.astype(np.float64)
    several = len(set(workload.kind.tolist())) > 1
    groups = workload.kind if several else cluster(prompts, outputs, clusters)
    names = {place: kind.name for place, kind in enumerate(workload.kinds)} if several else {}
    flows = tuple(
        _group(workload, outputs, groups == g, names.get(g), rate) for g in np.unique(groups).tolist()
    )
    flows = named_apart(flows)
    context = float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())
    source = f"trace {words.trace}" if words.trace else f"{workload.name} lengths"
    return Demand(source, flows, context, tuple(notes), lost)


def not_with(words: Experiment, name: str) -> None:
    """Refuses settings that describe the requests a second time."""
    for word in NOT_WITH_CLASSES:
        if word in words.model_fields_set and getattr(words, word) not in (None, ()):
            raise InputError(f"{name} and {flag(word)}: both describe the requests; drop one of the two")


def cluster(prompts: Floats, outputs: Floats, most: int) -> NDArray[np.int64]:
    """Up to so many groups of like prompt and output length: k-means in logarithms, the same every time.

    It starts from equal parts along the direction in which lengths differ most.
    """
    points = np.log(np.column_stack([np.maximum(prompts, 1.0), np.maximum(outputs, 1.0)]))
    centred = points - points.mean(axis=0)
    along = centred @ np.linalg.svd(centred, full_matrices=False)[2][0]
    edges = np.quantile(along, np.linspace(0, 1, most + 1)[1:-1])
    group = np.searchsorted(edges, along, side="right")
    for _ in range(ROUNDS):
        used = np.unique(group)
        centres = np.array([points[group == each].mean(axis=0) for each in used])
        nearest = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2).argmin(axis=1)
        if np.array_equal(nearest, group):
            break
        group = nearest
    found: NDArray[np.int64] = group.astype(np.int64)
    return found


def _group(
    workload: Workload, outputs: Floats, mine: NDArray[np.bool_], name: str | None, rate: float
) -> Flow:
    prompt, output = float(workload.prompt[mine].mean()), float(outputs[mine].mean())
    patience = float(workload.patience[mine].mean())
    called = name or f"{prompt:.0f}+{output:.0f}"
    return Flow(
        called, prompt, output, rate * float(mine.mean()), 1 / patience if isfinite(patience) else 0.0
    )


def named_apart(flows: tuple[Flow, ...]) -> tuple[Flow, ...]:
    """Clusters whose mean lengths read the same get numbers."""
    seen, found = Counter[str](), []
    for flow in flows:
        seen[flow.name] += 1
        number = seen[flow.name]
        found.append(replace(flow, name=f"{flow.name}.{number}") if number > 1 else flow)
    return tuple(found)


def _context(flows: tuple[Flow, ...]) -> float:
    """Exponential outputs: the one that runs has made D tokens on average."""
    tokens = sum(flow.rate * flow.output for flow in flows)
    read = sum(flow.rate * flow.output * (flow.prompt + flow.output) for flow in flows)
    return read / tokens if tokens > 0 else 0.0


def _enough(words: Experiment) -> Experiment:
    """Drawn lengths are drawn in number, so that means are those of their law."""
    if words.trace or words.requests or words.stages:
        return words
    return words.model_copy(update={"requests": max(DRAWN, DEFAULT_REQUESTS)})


def _rate_known(words: Experiment) -> float | None:
    """Requests per second of the whole fleet, as the words say; None: the trace's own."""
    if words.clients or words.all_at_once:
        raise InputError("a fluid plan needs arrivals per second; give --rate instead of another load")
    if words.rate is None and words.trace is None:
        raise InputError(
            "no class has arrivals; give --rate for the whole fleet, --class NAME:...,rate=R or a trace"
        )
    return words.rate


def _own_rate(workload: Workload) -> float:
    span = float(workload.arrival[-1] - workload.arrival[0])
    if span <= 0:
        raise InputError("the trace has no arrival times, or only one, so its rate is unknown; give --rate")
    return (len(workload) - 1) / span


def _flow(text: str, patience: float | None) -> Flow:
    """`code:prompt=300,output=1000,rate=10,patience=10s` as a class."""
    name, colon, rest = text.partition(":")
    if not colon or not name.strip():
        raise InputError(
            f"--class {text!r} is not NAME:prompt=TOKENS,output=TOKENS,rate=R; write "
            "code:prompt=300,output=1000,rate=10"
        )
    about, found = f"--class {name.strip()}: ", {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise InputError(f"{about}{part!r} is not NAME=VALUE; write it as prompt=300")
        if key not in (*NUMBERS, *OPTIONAL):
            raise unknown(f"setting of --class {name.strip()}", key, (*NUMBERS, *OPTIONAL))
        if key in found:
            raise InputError(f"{about}{key} is given twice; drop one of the two")
        found[key] = _number(about + key, value, key == "patience")
    missing = [key for key in NUMBERS if key not in found]
    if missing:
        raise InputError(f"{about}{missing[0]} is missing; write {missing[0]}=NUMBER")
    wait = found.get("patience", patience)
    if wait is not None and wait <= 0:
        raise InputError(f"{about}patience is {wait:g} s; give more than 0, or leave it out for ever")
    prompt, output, rate = (found[key] for key in NUMBERS)
    if rate <= 0:
        fault = "nobody arrives" if rate == 0 else "a rate is at least 0"
        raise InputError(f"{about}rate is {rate:g} requests/s: {fault}; give more than 0, or drop the class")
    return Flow(
        name.strip(), prompt, output, rate, 1 / wait if wait else 0.0, cached=found.get("cached", 0.0)
    )


def _number(about: str, text: str, time: bool) -> float:
    if time:
        return duration(text)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise InputError(f"{about}={text!r} is not a finite number; fix it")
    return value
