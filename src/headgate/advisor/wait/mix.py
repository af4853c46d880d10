"""Who comes, as WAIT's planners want it: types with rates, lengths for segments, rates that change."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from headgate.advisor.settings import WaitSettings
from headgate.advisor.situation import served_lengths
from headgate.core.errors import InputError
from headgate.experiment.settings import Experiment
from headgate.methods.wait.iteration import Part, seen_kind
from headgate.methods.wait.segments import Segments, equal_shares, even_ends, segments_from, worst
from headgate.methods.wait.sorting import read_ends
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload

COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20)  # numbers of segments to try
MOST_WINDOWS = 10_000
FEW = 100  # requests in a window below which its survival is not told apart from chance
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Mix:
    """The requests: types for WAIT, lengths and times for Nested WAIT."""

    names: tuple[str, ...]
    parts: list[Part]
    split: str  # how `wait` tells the types apart
    prompt: float
    decodes: Floats
    arrival: Floats
    rate: float


def check_wishes(wishes: WaitSettings) -> None:
    """Numbers that make sense, and none that exclude each other."""
    for name, value, fine, remedy in (
        ("load", wishes.load, wishes.load is None or 0 < wishes.load < 1, "a share above 0 and below 1"),
        ("slack", wishes.slack, 0 <= wishes.slack < inf, "a share, 0 or more"),
        ("miss", wishes.miss, 0 < wishes.miss < 1, "a probability above 0 and below 1"),
        ("horizon", wishes.horizon, wishes.horizon > 0, "more than 0 s"),
        ("segments", wishes.segments, wishes.segments is None or wishes.segments >= 1, "1 or more"),
        ("types", wishes.types, wishes.types is None or wishes.types >= 2, "2 or more"),
        ("batch", wishes.batch, wishes.batch is None or wishes.batch >= 1, "1 request or more"),
        ("every", wishes.every, wishes.every is None or wishes.every > 0, "more than 0 s"),
    ):
        if not fine:
            raise InputError(f"--{name} {value}: give {remedy}")
    read_ends("plan wait", wishes.ends)
    if wishes.ends and wishes.segments:
        raise InputError("--ends says where segments end, --segments how many; drop one of the two")
    if wishes.every is not None and wishes.load is not None:
        raise InputError("--every looks at when requests come, --load has no times; give --rate or a trace")


def gathered_mix(settings: Experiment, wishes: WaitSettings, workload: Workload, engine: Engine) -> Mix:
    """Types are the kinds of the workload, or groups by output length where the wishes say so.

    Where rates change (`every`), each type comes as often as in its own busiest window: (13) for types.
    """
    prompts, decodes = (lengths.astype(np.int64) for lengths in served_lengths(workload, engine))
    fits = workload.prompt < engine.longest
    kind, arrival = workload.kind[fits], workload.arrival[fits]
    rate = _rate(settings, wishes, workload)
    names = [each.name for each in workload.kinds]
    split = "kind"
    if wishes.types is not None:
        bounds = equal_shares(decodes + 1, wishes.types)[:-1]
        kind = np.searchsorted(bounds, decodes + 1, side="left")
        names, split = [*map(str, bounds), "more"], "output:" + "/".join(map(str, bounds))
        if not bounds:
            raise InputError(f"--types {wishes.types}: outputs are too alike to be split; leave it out")
    present = [number for number in range(len(names)) if np.any(kind == number)]
    parts = []
    for number in present:
        theirs = kind == number
        busy = float(np.mean(theirs))
        if wishes.every is not None:
            counts = np.bincount(_windows(arrival, wishes.every)[theirs])
            busy = float(counts.max()) * _span(arrival) / wishes.every / (len(arrival) - 1)
        parts.append(seen_kind(rate * busy, prompts[theirs], decodes[theirs], engine.block))
    prompt = float(prompts.mean()) + (engine.block - 1) / 2
    shown = tuple(names[number] for number in present)
    return Mix(shown, parts, split, prompt, decodes.astype(np.float64), arrival, rate)


def _rate(settings: Experiment, wishes: WaitSettings, workload: Workload) -> float:
    """Requests per second; any, where the load is to be a share of what the card can carry."""
    span = _span(workload.arrival)
    if wishes.load is not None:
        if settings.rate or settings.clients or settings.trace:
            raise InputError("--load scales the rate, but another load is given; drop one of the two")
        return 1.0
    if workload.closed or span <= 0:
        raise InputError(
            "thresholds of WAIT are for a rate; give --rate, a trace with its own times, or --load 0.9 for a "
            "share of what the card can carry"
        )
    return settings.rate or (len(workload) - 1) / span


def scaled(mix: Mix, factor: float) -> Mix:
    """The same at another rate."""
    parts = [part._replace(rate=part.rate * factor) for part in mix.parts]
    return Mix(mix.names, parts, mix.split, mix.prompt, mix.decodes, mix.arrival, mix.rate * factor)


def candidates(mix: Mix, wishes: WaitSettings) -> list[Segments]:
    """Ways to cut: as told, or in segments of equal width and of equal shares of the requests."""
    longest = int(mix.decodes.max())
    if wishes.ends:
        given = read_ends("nested-wait", wishes.ends)
        cuts = [given if given[-1] >= longest else (*given, longest)]
    else:
        counts = [wishes.segments] if wishes.segments else [n for n in COUNTS if n <= max(1, longest)]
        cuts = [even_ends(longest, count) for count in counts]
        cuts += [equal_shares(mix.decodes, count) for count in counts]
    unique = dict.fromkeys(cuts)
    if wishes.every is None:
        return [segments_from(mix.prompt, mix.decodes, mix.rate, ends) for ends in unique]
    place = _windows(mix.arrival, wishes.every)
    parts = [mix.decodes[place == number] for number in np.unique(place)]
    parts = [part for part in parts if len(part) >= FEW] or [mix.decodes]
    most = max(windows(mix, wishes.every))
    return [worst([segments_from(mix.prompt, part, most, ends) for part in parts]) for ends in unique]


def windows(mix: Mix, every: float) -> list[float]:
    """Requests per second, window by window."""
    own = (len(mix.arrival) - 1) / _span(mix.arrival)
    return [float(count) / every * mix.rate / own for count in np.bincount(_windows(mix.arrival, every))]


def _windows(arrival: Floats, every: float) -> NDArray[np.int64]:
    """In which window each request comes."""
    if _span(arrival) > MOST_WINDOWS * every:
        least = _span(arrival) / MOST_WINDOWS
        raise InputError(
            f"--every {every:g}s makes more than {MOST_WINDOWS:,} windows; give {least:.3g}s or more"
        )
    number: NDArray[np.int64] = ((arrival - arrival[0]) // every).astype(np.int64)
    return number


def _span(arrival: Floats) -> float:
    return float(np.ptp(arrival))
