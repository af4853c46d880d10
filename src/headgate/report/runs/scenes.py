"""Runs put together: those on the same requests form a scene, and scenes differ in their load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import recorded_card
from headgate.methods.bounds import Bound, Requests, engine_bound
from headgate.record.tables import Run
from headgate.stats.comparison import Comparison, compare
from headgate.stats.flow import offered
from headgate.stats.measured import Measured, speculates
from headgate.stats.metrics import Metrics

RATE, CLIENTS, AT_ONCE = "rate", "clients", "all-at-once"


class Compared(NamedTuple):
    """One of those that are compared, several, and the head of the column that names them."""

    one: str
    many: str
    head: str


POLICIES = Compared("policy", "policies", "policy")
ROUTERS = Compared("router", "routers", "router")
BOTH = Compared("combination", "combinations of router and policy", "router, policy")
SETUPS = Compared("setup", "setups", "setup")


def compared(runs: Iterable[Run]) -> Compared:
    """Runs of different engines are setups, whatever else differs; of one engine, routers or policies."""
    meta = [run.meta for run in runs]

    def differ(*words: str) -> bool:
        return len({repr([_plain(one.get(word)) for word in words]) for one in meta}) > 1

    if differ("engine", "engines", "asynchronous", "card"):
        return SETUPS
    if not differ("router", "router_parameters"):
        return POLICIES
    return BOTH if differ("policy", "parameters") else ROUTERS


def _plain(value: Any) -> Any:
    """Settings in one order, and what is not said as what is off."""
    return sorted(value.items()) if isinstance(value, dict) else value or None


class SceneLoad(NamedTuple):
    """How requests were sent: so many per second, by so many clients, or all at once.

    In a sweep over another word it is that word and its value, for it stands in the load's place on the axis.
    """

    kind: str
    value: float

    @property
    def text(self) -> str:
        if self.kind == CLIENTS:
            return f"{self.value:,.0f} clients in a closed loop"
        if self.kind == RATE:
            return f"{self.value:,.4g} requests/s offered"
        return "all requests at once" if self.kind == AT_ONCE else self.short

    @property
    def short(self) -> str:
        return f"{self.value:,.4g} {self.unit}" if self.unit else f"{self.kind} {self.value:,.4g}"

    @property
    def unit(self) -> str:
        """Of the value, "" where its kind says it."""
        return {CLIENTS: "clients", RATE: "requests/s"}.get(self.kind, "")


@dataclass(frozen=True)
class Scene:
    """Runs on the same requests: by policy, or what else is compared, then by seed; the baseline first.

    What is worked out from them is kept, so that terminal, JSON and HTML say the same and share the work.
    """

    title: str
    load: SceneLoad
    runs: Mapping[str, Sequence[Measured]]
    place: str = ""  # in a sweep: the swept word and its value

    @property
    def first(self) -> dict[str, Measured]:
        return {name: own[0] for name, own in self.runs.items()}

    @property
    def tables(self) -> dict[str, Run]:
        return {name: own[0].run for name, own in self.runs.items()}

    @property
    def compared(self) -> Compared:
        return compared(self.tables.values())

    @property
    def metrics(self) -> dict[str, Metrics]:
        return {name: own.metrics for name, own in self.first.items()}

    @cached_property
    def comparison(self) -> Comparison | str | None:
        """The paired comparison; in words why there is none; None where there is nothing to compare."""
        if len(self.runs) < 2:
            return None
        runs = self.runs.items()
        ends = {name: [one.run.meta.get("outcome", "finished") for one in own] for name, own in runs}
        if broken := [name for name, own in ends.items() if {*own} != {"finished"}]:
            return f"not every run came to its end ({', '.join(broken)})"
        try:
            most = self.bound.rate if self.bound else None
            return compare(self.runs, next(iter(self.runs)), bound=most)
        except InputError as error:
            return str(error)

    @property
    def engines(self) -> int:
        run = next(iter(self.tables.values()))
        return int(run.meta.get("engines") or max(1, len(np.unique(run.steps["replica"]))))

    @cached_property
    def bound(self) -> Bound | None:
        """The rate no policy exceeds on the requests that rates are measured on, those of the baseline's
        window; None where the card does not tell.
        """
        first = next(iter(self.first.values()))
        run, counted = first.run, first.window.counted
        limits = dict(run.meta.get("engine") or {})
        done = counted[run.requests["output"][counted] >= 1]
        if not limits or not len(done):
            return None
        if any(found.prefix_cache for found in self.metrics.values()):
            return None  # prompts that are found cost less than the bound counts
        lengths = Requests.of(run.requests["prompt"][done], run.requests["output"][done] - 1)
        if speculates(run):
            return None  # what drafts take is not recorded
        try:
            cost = recorded_card(run.meta["card"]).cost
            return engine_bound(
                cost, lengths, limits["running"], limits["batch_tokens"], limits["kv_tokens"], self.engines
            )
        except (InputError, KeyError):
            return None


def what_differs(scenes: Sequence[Scene]) -> Compared:
    """What is compared in all of them; what differs from scene to scene is their load, not this."""
    found = {scene.compared for scene in scenes if len(scene.runs) > 1}
    if len(found) == 1:
        return next(iter(found))
    return compared(run for scene in scenes for run in scene.tables.values())


def load_of(run: Run) -> SceneLoad:
    """How its requests were sent; a trace's own rate is measured."""
    if run.sending == "closed":
        return SceneLoad(CLIENTS, float(run.meta.get("clients") or 0))
    arrival = run.requests["arrival"]
    if run.sending == AT_ONCE or len(arrival) < 2 or not np.ptp(arrival) > 0:
        return SceneLoad(AT_ONCE, math.nan)
    return SceneLoad(RATE, offered(run))


def title_of(run: Run) -> str:
    """What was served, on what, under which load."""
    about = run.meta.get("workload")
    what = str(about.get("name") or "requests") if isinstance(about, dict) else "requests"
    where = run.meta.get("card") or run.meta.get("model") or run.meta.get("driver", "")
    clients = (run.meta.get("clients_beside") or {}).items()
    beside = "".join(f" beside {number:,} clients of {name}" for name, number in clients)
    return f"{what}{f' on {where}' if where else ''}, {load_of(run).text}{beside}"


def gather(runs: Sequence[Run], names: Sequence[str] | None = None) -> list[Scene]:
    """Scenes by what was sent and how, in the order they come; equal names get a number.

    Runs of one policy that differ in nothing but their seed are seeds of it.
    """
    found: dict[tuple[object, ...], dict[str, list[Run]]] = {}
    for place, run in enumerate(runs):
        own = found.setdefault(_key(run), {})
        wanted = names[place] if names else str(run.meta.get("label") or run.meta.get("policy") or "run")
        if wanted in own and run.meta.get("router") != own[wanted][0].meta.get("router"):
            wanted = f"{wanted} ({run.meta.get('router') or 'no router'})"
        name, again = wanted, 1
        while name in own and not _another_seed(run, own[name]):
            again += 1
            name = f"{wanted} ({again})"
        own.setdefault(name, []).append(run)
    return [scene_of(own) for own in found.values()]


def scene_of(own: Mapping[str, Sequence[Run | Measured]], title: str = "") -> Scene:
    """Runs that are known to be on the same requests."""
    runs = {name: [Measured.of(run) for run in each] for name, each in own.items()}
    run = next(iter(runs.values()))[0].run
    return Scene(title or title_of(run), load_of(run), runs)


def swept(own: Mapping[str, Sequence[Run | Measured]], word: str, at: object) -> Scene:
    """The runs at one place of a sweep; a word that is not the load is named, and stands for it."""
    scene = scene_of(own)
    if not word:
        return scene
    scene = replace(scene, place=f"{word.replace('_', '-')} {at}")
    if word in (RATE, CLIENTS, "scale_rate"):
        return scene
    load = SceneLoad(word.replace("_", " "), float(at)) if isinstance(at, int | float) else scene.load
    return replace(scene, title=f"{scene.title}, {word.replace('_', ' ')} {at}", load=load)


def _key(run: Run) -> tuple[object, ...]:
    about = run.meta.get("workload")
    name = (about.get("name"), about.get("trace")) if isinstance(about, dict) else ()
    load = load_of(run)
    value = None if math.isnan(load.value) else float(f"{load.value:.4g}")
    return run.meta.get("card"), *name, load.kind, value


def _another_seed(run: Run, own: Sequence[Run]) -> bool:
    first = own[0].meta
    words = ("policy", "parameters", "engine", "engines", "router", "router_parameters")
    same = all(run.meta.get(word) == first.get(word) for word in words)
    same = same and bool(run.meta.get("asynchronous")) == bool(first.get("asynchronous"))
    return same and "seed" in run.meta and run.meta["seed"] not in [other.meta.get("seed") for other in own]
