"""Policies side by side at several loads: what the WAIT experiments have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf, isfinite, nan
from typing import Any, NamedTuple

from headgate.core.errors import InputError
from headgate.methods.wait.inventory import keeping_up, offered
from headgate_papers.report import Cell, Count, Report, Row, Section, sign
from headgate_papers.serving import Options, Outcomes
from headgate_papers.wait.balance import most_rate
from headgate_papers.wait.rules import printed_rule, work_share
from headgate_papers.wait.runs import FOR_EVER, Machine, Mix, WaitJob, segments_of

SOURCE = (
    "Optimizing LLM Inference: Fluid-Guided Online Scheduling with Memory Constraints (Ao et al., April 2025)"
)
STEP = 1.05  # iterations this much longer than the shortest that keep up
NESTED_SHARE = 0.9  # of memory for full segments
LONG = 120.0  # seconds a run lasts where nothing else is said

Way = Callable[[Machine, Mix], tuple[str, dict[str, Any]]]


class Scene(NamedTuple):
    """One row of a table: a load on a machine."""

    name: str
    machine: Machine
    mix: Mix
    seconds: float = LONG


def load_of(machine: Machine, mix: Mix) -> float:
    """u: the offered work by what memory full of batched KV can do, or by what the slots can."""
    return 1 / most_rate(machine.lines(mix.parts), mix.parts, machine.kv, machine.slots)


def at_load(machine: Machine, mix: Mix, load: float) -> Mix:
    """The same mix at that load."""
    return mix.times(load / load_of(machine, mix))


def longest(machine: Machine, mix: Mix) -> float:
    """The longest pace that memory, with room for one request more of each type, and slots allow."""
    parts = mix.parts
    room = machine.kv - sum(part.peak for part in parts)
    return min(room / offered(parts), machine.slots / sum(part.rate * part.stages for part in parts))


def paced(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """WAIT at a pace a little above the shortest that keeps up; in overload as full as it can be."""
    most = longest(machine, mix)
    try:
        pace = min(STEP * keeping_up(machine.lines(mix.parts), mix.parts).shortest, most)
    except InputError:
        pace = most
    return "wait", {"thresholds": by_type([part.rate * pace for part in mix.parts]), **FOR_EVER}


def full(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """WAIT with memory or slots as full as they can be."""
    pace = longest(machine, mix)
    return "wait", {"thresholds": by_type([part.rate * pace for part in mix.parts]), **FOR_EVER}


def printed(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """WAIT with the paper's rule, its batch limit the slots, or as large as memory allows."""
    return "wait", {"thresholds": by_type(_within(machine, mix, printed_rule)), **FOR_EVER}


def shared(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """The same with the share of work, as we correct it."""
    return "wait", {"thresholds": by_type(_within(machine, mix, work_share)), **FOR_EVER}


def _within(machine: Machine, mix: Mix, rule: Callable[..., tuple[float, ...]]) -> list[float]:
    parts = mix.parts
    one = rule(parts, 1.0)
    room = machine.kv - sum(part.peak for part in parts)
    most = room / sum(size * part.work for size, part in zip(one, parts, strict=True))
    return [size * min(machine.slots, most) for size in one]


def learned(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """WAIT as it comes: thresholds from the traffic, patience, guard."""
    return "wait", {}


def pacer(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """The same without any pause: thresholds only pace who enters."""
    return "wait", {"max_pause": 0.0}


def nested(slack: float, ends: tuple[int, ...] | None = None) -> Way:
    """Nested WAIT with that much slack; a segment per type unless `ends` says where to cut."""

    def way(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
        prompt = mix.types[0][1]
        segments = segments_of(prompt, [(rate, decodes) for rate, _, decodes in mix.types], ends)
        parts = segments.parts(slack)
        pace = NESTED_SHARE * machine.kv / offered(parts)
        with suppress(InputError):  # overload: as full as it may be
            pace = min(STEP * keeping_up(machine.lines(parts), parts).shortest, pace)
        sizes = [part.rate * pace for part in parts]
        words = {"ends": "/".join(map(str, segments.ends)), "thresholds": "/".join(map(repr, sizes))}
        return "nested-wait", {**words, **FOR_EVER}

    return way


def learned_nested(count: int) -> Way:
    """Nested WAIT as it comes, with so many segments."""
    return lambda machine, mix: ("nested-wait", {"segments": count})


def nested_pacer(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """Nested WAIT as it comes, but without any pause."""
    return "nested-wait", {"max_pause": 0.0}


def prefill_first(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """vLLM-like: a prefill-only batch whenever a prompt can enter."""
    return "v0", {}


def mixed(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """Sarathi-like: all decodes, and prompts beside them."""
    return "mixed", {}


def watermarked(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """The same with a hundredth of the KV, at least a token, that no prompt may take."""
    return "sarathi", {}


def look_ahead(machine: Machine, mix: Mix) -> tuple[str, dict[str, Any]]:
    """Lengths known: all decodes, and prompts while everybody will fit to the end."""
    return "look-ahead", {}


BASELINES: dict[str, Way] = {"v0": prefill_first, "mixed": mixed}


def jobs_of(scenes: Iterable[Scene], ways: dict[str, Way], options: Options, lost: int = 0) -> list[WaitJob]:
    """Every scene under every policy; a quick one lasts a tenth as long."""
    return [
        WaitJob(
            (scene.name, name),
            scene.machine,
            scene.mix,
            scene.seconds / 10 if options.quick else scene.seconds,
            *way(scene.machine, scene.mix),
            lost,
        )
        for scene in scenes
        for name, way in ways.items()
    ]


def by_type(sizes: list[float]) -> str:
    """Thresholds as `wait` reads them; the types of these runs are numbered."""
    return "+".join(f"{number}={size!r}" for number, size in enumerate(sizes))


def throughput(found: Outcomes, scenes: Iterable[Scene], names: Iterable[str]) -> Section:
    """Decode tokens per second, in thousands, beside what arrives: the paper's bound throughput*."""
    rows = []
    for scene in scenes:
        limit = sum(rate * decodes for rate, _, decodes in scene.mix.types) / 1e3
        ours = (found.figure((scene.name, name), "decodes") / 1e3 for name in names)
        rows.append(Row(scene.name, tuple(Cell(nan, value) for value in (limit, *ours))))
    return Section("Decode tokens/s, thousands", "load", ("arrives", *names), tuple(rows))


def figures(
    found: Outcomes,
    scenes: Iterable[Scene],
    names: Iterable[str],
    title: str,
    figure: str,
    scale: float = 1.0,
) -> Section:
    """One figure of ours; nothing is published beside it."""
    rows = [
        Row(
            scene.name,
            tuple(Cell(nan, scale * found.figure((scene.name, name), figure)) for name in names),
        )
        for scene in scenes
    ]
    return Section(title, "load", tuple(names), tuple(rows))


def claim(found: Outcomes, scenes: Iterable[Scene], wait: Iterable[str], figure: str, what: str) -> Count:
    """How often the best of the WAIT columns is really better than each baseline, by more than a tie."""
    pairs: list[tuple[object, object]] = []
    better = -1 if figure == "latency" else 1
    for scene in scenes:
        values = [found.figure((scene.name, name), figure) for name in wait]
        best = max((better * value for value in values if isfinite(value)), default=-inf)
        for name in BASELINES:
            base = found.figure((scene.name, name), figure)
            if isfinite(best) and isfinite(base):
                pairs.append((1, better * sign(better * best, base)))
    return Count.of_pairs(what, pairs)


def nested_report(
    name: str,
    title: str,
    setup: tuple[str, ...],
    found: Outcomes,
    rows: list[Scene],
    wait: dict[str, Way],
    remarks: tuple[str, ...],
    more: tuple[tuple[str, str], ...] = (),
) -> Report:
    """Throughput, latency and memory of Nested WAIT beside the baselines; `more` names further figures."""
    names = (*wait, *BASELINES)
    under = [scene for scene in rows if load_of(scene.machine, scene.mix) < 1]
    return Report(
        name,
        title,
        setup,
        (
            throughput(found, rows, names),
            figures(found, rows, names, "Mean latency, s", "latency"),
            figures(found, rows, names, "Mean TPOT, ms", "tpot", 1e3),
            figures(found, rows, names, "Most KV held, tokens", "peak"),
            *(figures(found, rows, names, head, figure) for head, figure in more),
        ),
        (
            claim(found, rows, wait, "decodes", "Nested WAIT serves more than a baseline (paper: yes)"),
            claim(found, under, wait, "latency", "Nested WAIT has the lower latency, u below 1 (paper: yes)"),
        ),
        remarks,
    )
