"""Workloads drawn from arrival processes and length laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.workloads.arrivals import AllAtOnce, ArrivalProcess, Poisson
from headgate.workloads.lengths import LengthLaw, Pairs
from headgate.workloads.streams import stream
from headgate.workloads.workload import OPEN_LOOP, Kind, Real, Whole, Workload

MOST = 100_000_000  # requests of one workload: far more than any memory holds a run of
PAIRS = "lengths.pairs"  # the stream that pairs are drawn from
UNSAID = (("tenant", ""), ("background", False))  # of a recipe, where they were not given


class Share(NamedTuple):
    """One class of a mix: its share of the requests, what its requests look like, and whose they are.

    A class may be there once for each of several tenants.

    Examples:
        >>> from headgate import Kind, Share, generate, length_law
        >>> short, long = length_law("fixed", 100), length_law("fixed", 900)
        >>> mix = [Share(3, Kind("chat"), short, long), Share(1, Kind("code"), long, short)]
        >>> sorted(set(generate(50, classes=mix).prompt.tolist()))
        [100, 900]
    """

    share: float
    kind: Kind
    prompt: LengthLaw
    output: LengthLaw
    patience: float = math.inf
    tenant: str = ""


class WorkloadStage(NamedTuple):
    requests: int
    rate: float | None = None
    clients: int | None = None
    prompt: LengthLaw | None = None
    output: LengthLaw | None = None


class Recipe(NamedTuple):
    seed: int
    arrivals: ArrivalProcess | None
    prompt: LengthLaw | None
    output: LengthLaw | None
    pairs: Pairs | None
    classes: tuple[Share, ...]
    clients: int | None
    stages: tuple[WorkloadStage, ...]


def generate(
    requests: int | None = None,
    *,
    seed: int = 0,
    arrivals: ArrivalProcess | None = None,
    prompt: LengthLaw | None = None,
    output: LengthLaw | None = None,
    pairs: Pairs | None = None,
    classes: Sequence[Share] = (),
    clients: int | None = None,
    stages: Sequence[WorkloadStage] = (),
    name: str = "",
) -> Workload:
    """Draws a workload: the same arguments give the same requests.

    Arrivals, prompts, outputs and classes come from streams of their own, and so do the lengths of each class
    of a mix and of each stage: changing one law leaves all other draws as they were.

    Args:
        requests: how many; may be left out when stages say it.
        seed: one number for the whole workload.
        arrivals: the arrival process of an open loop; all at once when left out (with stage rates: Poisson).
        prompt: the law of prompt lengths.
        output: the law of output lengths.
        pairs: instead of the two laws, pairs drawn together.
        classes: instead of the two laws, a mix; shares are taken relative to their sum.
        clients: makes a closed loop of so many clients.
        stages: stretches of requests with another rate, number of clients or lengths.
        name: what reports call it.

    Examples:
        >>> import headgate
        >>> requests = headgate.generate(
        ...     1000,
        ...     arrivals=headgate.arrival_process("poisson", rate=20.0),
        ...     prompt=headgate.length_law("lognormal", 512),
        ...     output=headgate.length_law("geometric", 128),
        ... )
        >>> len(requests)
        1000
    """
    for side, law in (("prompt", prompt), ("output", output)):
        if law is not None and not hasattr(law, "draw"):
            raise InputError(
                f'{side}={law!r} is no length law; write {side}=headgate.length_law("fixed", 512)'
            )
    if requests is not None and requests < 1:
        raise InputError(f"{requests} requests; give at least 1")
    if requests is None and not stages:
        raise InputError("the number of requests is missing; give it, or stages")
    stages = tuple(stages) or (WorkloadStage(requests or 0),)
    recipe = Recipe(seed, arrivals, prompt, output, pairs, tuple(classes), clients, stages)
    _check(recipe, requests)
    drawn = _classes(recipe)
    ends = np.cumsum([stage.requests for stage in stages])
    parts = [_stage_lengths(recipe, number, mine) for number, mine in enumerate(np.split(drawn, ends[:-1]))]
    prompts, outputs = (np.concatenate(column) for column in zip(*parts, strict=True))
    clients_by_stage = []
    for number, stage in enumerate(stages):
        many = clients if stage.clients is None else stage.clients
        if many is not None and many < 1:
            raise InputError(f"stage {number} has {many} clients; give at least 1")
        clients_by_stage.append(OPEN_LOOP if many is None else many)
    patience = np.array([share.patience for share in recipe.classes])[drawn] if recipe.classes else np.inf
    kinds = [share.kind for share in recipe.classes] or [Kind()]
    tenants = [share.tenant for share in recipe.classes] or [""]
    if len({*zip(kinds, tenants, strict=True)}) == len(kinds):  # else the workload refuses equal names
        known = list(dict.fromkeys(kinds))
        drawn_kinds, kinds = np.array([known.index(kind) for kind in kinds])[drawn], known
    else:
        drawn_kinds = drawn
    named = list(dict.fromkeys(tenants))
    return Workload.of(
        prompts,
        outputs,
        arrival=_arrivals(recipe),
        clients=np.repeat(clients_by_stage, [stage.requests for stage in stages]),
        kind=drawn_kinds,
        patience=patience,
        kinds=kinds,
        tenant=np.array([named.index(tenant) for tenant in tenants])[drawn],
        tenants=named,
        name=name,
        origin={"drawn": _described(recipe)},
    )


def _check(recipe: Recipe, requests: int | None) -> None:
    total = 0
    for number, stage in enumerate(recipe.stages):
        if stage.requests < 1:
            raise InputError(f"stage {number} has {stage.requests} requests; give at least 1")
        if (recipe.classes or recipe.pairs) and (stage.prompt or stage.output):
            raise InputError(
                f"stage {number} changes lengths that come from classes or pairs; give laws instead"
            )
        total += stage.requests
    if total > MOST:
        raise InputError(f"{total} requests are too many for one run; give at most {MOST}")
    if requests is not None and requests != total:
        raise InputError(f"{requests} requests, but the stages have {total}; make them agree")
    laws = recipe.prompt is not None or recipe.output is not None
    if bool(recipe.classes) + (recipe.pairs is not None) + laws > 1:
        raise InputError("lengths come from laws, from pairs or from classes; give only one of them")
    if recipe.arrivals is not None and recipe.clients is not None:
        raise InputError("an arrival process in a closed loop; drop the arrivals or the clients")


def _classes(recipe: Recipe) -> Whole:
    total = sum(stage.requests for stage in recipe.stages)
    if not recipe.classes:
        return np.zeros(total, dtype=np.int64)
    for share in recipe.classes:
        if not 0 < share.share < math.inf:
            raise InputError(f"share of kind {share.kind.name!r} is {share.share:g}; give a number above 0")
    shares = np.array([share.share for share in recipe.classes])
    if not math.isfinite(sum(shares.tolist())):
        raise InputError("the shares of the kinds are too large to be added; give smaller numbers")
    bounds = np.cumsum(shares) / shares.sum()
    # The last bound is 1 up to rounding; leaving it out keeps every draw inside.
    return np.searchsorted(bounds[:-1], stream(recipe.seed, "classes").random(total), side="right")


def _stage_lengths(recipe: Recipe, number: int, drawn: Whole) -> tuple[Whole, Whole]:
    stage, count = recipe.stages[number], len(drawn)
    if recipe.classes:
        return _class_lengths(recipe, number, drawn)
    if recipe.pairs is not None:
        return recipe.pairs.draw(count, _stream(recipe, PAIRS, number))
    prompt, output = stage.prompt or recipe.prompt, stage.output or recipe.output
    if prompt is None or output is None:
        raise InputError("lengths are missing; give a prompt law and an output law, pairs or classes")
    return (
        prompt.draw(count, _stream(recipe, "lengths.prompt", number)),
        output.draw(count, _stream(recipe, "lengths.output", number)),
    )


def _class_lengths(recipe: Recipe, number: int, drawn: Whole) -> tuple[Whole, Whole]:
    prompts, outputs = np.empty_like(drawn), np.empty_like(drawn)
    names = [share.kind.name for share in recipe.classes]
    for place, share in enumerate(recipe.classes):
        rows, name = drawn == place, share.kind.name
        if names.count(name) > 1:  # a stream for each tenant
            name += f"/{share.tenant}"
        count = int(rows.sum())
        prompts[rows] = share.prompt.draw(count, _stream(recipe, "lengths.prompt", number, name))
        outputs[rows] = share.output.draw(count, _stream(recipe, "lengths.output", number, name))
    return prompts, outputs


def _stream(recipe: Recipe, name: str, number: int, kind: str = "") -> np.random.Generator:
    """The stream of one class in one stage; the first stage has the plain name, as without stages."""
    stage = f".stage-{number}" if number else ""
    return stream(recipe.seed, name + stage + (f"/{kind}" if kind else ""))


def _arrivals(recipe: Recipe) -> Real:
    generator = stream(recipe.seed, "arrivals")
    start, parts = 0.0, []
    for number, stage in enumerate(recipe.stages):
        process = recipe.arrivals or (AllAtOnce() if stage.rate is None else Poisson(stage.rate))
        if stage.rate is not None:
            if recipe.clients is not None or stage.clients is not None:
                raise InputError(f"stage {number} has a rate in a closed loop; give it clients instead")
            if isinstance(process, AllAtOnce):
                raise InputError(
                    f"stage {number} has a rate, the arrivals have none; choose 'poisson' or drop the rate"
                )
            process = replace(process, rate=stage.rate)
        times = start + process.draw(stage.requests, generator)
        start = float(times[-1])
        parts.append(times)
    return np.concatenate(parts)


def _described(thing: object) -> object:
    """Plain values that say how something was made; lengths seen before only by their number."""
    if isinstance(thing, np.ndarray):
        return {"values": len(thing), "mean": float(thing.mean())}
    if isinstance(thing, tuple):
        named = getattr(thing, "_asdict", None)
        if named is None:
            return [_described(each) for each in thing]
        given = {key: value for key, value in named().items() if value not in (None, ())}
        return {key: _described(value) for key, value in given.items() if (key, value) not in UNSAID}
    if is_dataclass(thing) and not isinstance(thing, type):
        parts = {each.name: _described(getattr(thing, each.name)) for each in fields(thing)}
        return {"law": type(thing).__name__, **parts}
    if isinstance(thing, float) and not math.isfinite(thing):
        return None  # patience without end; JSON has no infinity
    return thing if isinstance(thing, str | int | float) or thing is None else repr(thing)
