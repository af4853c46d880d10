"""Runs put together: those on the same requests form a scene, and scenes differ in their load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.core.request import GAP, MEAN
from headgate.cost.card import load_card
from headgate.methods.bounds import Bound, Requests, engine_bound
from headgate.record.tables import Run
from headgate.report.charts import HIGHEST, LOG, LOWEST, TAIL, Axis, Chart, Mark, Series, distribution
from headgate.report.document import Cell, Figure, Grid, Row, interval, number, row, share, time_unit, valued
from headgate.stats.comparison import Comparison, Whole, compare, doubts_of
from headgate.stats.figures import Estimate, Spread
from headgate.stats.flow import OVERLOADED, offered
from headgate.stats.gaps import Sample
from headgate.stats.measured import Measured, between_kind, speculates
from headgate.stats.metrics import Metrics

RATE, CLIENTS, AT_ONCE = "rate", "clients", "all-at-once"


class Compared(NamedTuple):
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

    def plain(value: Any) -> Any:  # settings in one order, and what is not said as what is off
        return sorted(value.items()) if isinstance(value, dict) else value or None

    def differ(*words: str) -> bool:
        return len({repr([plain(one.get(word)) for word in words]) for one in meta}) > 1

    if differ("engine", "engines", "asynchronous", "card"):
        return SETUPS
    if not differ("router", "router_parameters"):
        return POLICIES
    return BOTH if differ("policy", "parameters") else ROUTERS


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

    def served(self, name: str) -> Estimate:
        return _over_seeds(self.runs[name], SERVED)

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
        # Prompts that are found cost less than the bound counts; what drafts take is not recorded.
        found_again = any(found.prefix_cache for found in self.metrics.values())
        if not limits or not len(done) or found_again or speculates(run):
            return None
        lengths = Requests.of(run.requests["prompt"][done], run.requests["output"][done] - 1)
        try:
            cost = load_card(run.meta["card"]).cost
            most = (limits["running"], limits["batch_tokens"], limits["kv_tokens"])
            return engine_bound(cost, lengths, *most, self.engines)
        except (InputError, KeyError):
            return None


def overloaded(scene: Scene) -> dict[str, Measured]:
    """The runs of an open loop whose backlog grows: that is seen, or no policy serves what is offered."""
    load = load_of(next(iter(scene.tables.values())))  # in a sweep another word stands in its place
    if load.kind != RATE:
        return {}
    above = bool(scene.bound and load.value > scene.bound.rate)
    return {name: one for name, one in scene.first.items() if above or one.trend.growing}


def _not_compared(scene: Scene) -> dict[str, str]:
    """Why the rate of a run says nothing about the long run."""
    doubts = doubts_of(scene.runs, scene.bound.rate if scene.bound else None)
    for name in doubts:
        said = (f"{one.trend.said}." for one in scene.runs[name] if not one.trend.stationary)
        doubts[name] = next(said, "Serves more than any policy can in the long run.")
    return doubts | dict.fromkeys(overloaded(scene), f"{OVERLOADED}. {LONGER}")


def bounded(scene: Scene, bound: float) -> str:
    best = max(served_rates(found)["Requests"].value for found in scene.first.values())
    where = f" and {scene.engines} engines" if scene.engines > 1 else ""
    edges = " Above 100 %: requests at the edges of the window were partly served outside it."
    return (
        f"On the measured requests{where} no policy serves more than {number(bound)} requests/s (a bound "
        f"from the card's step times). The most served is {number(best)}: {100 * best / bound:.0f} % of "
        f"it.{edges if best > bound else ''}"
    )


def served_rates(found: Measured) -> dict[str, Estimate]:
    """Requests and tokens. Of a run that is not steady over the whole run, and those of outputs are not told:
    there the order of service decides what ends in the window.
    """
    if unsteady(found):
        return dict(zip(("Requests", "All tokens"), Whole.rates([found]), strict=True))
    metrics = found.metrics
    rates = {"Requests": metrics.request_rate, "Output tokens": metrics.output_rate}
    return rates | {"All tokens": metrics.total_rate}


def unsteady(found: Measured) -> bool:
    return found.run.sending == "open" and not found.trend.stationary


def what_differs(scenes: Sequence[Scene]) -> Compared:
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


# -- figures against load, with the rate no policy exceeds

Read = Callable[[Metrics], Estimate]
UNKNOWN = Estimate(float("nan"))
SEVERAL = "Means over seeds; the intervals are those of these means."
NOT_COMPARED = "!"
LONGER = "Latencies and kept promises get worse the longer the run: lower the rate or add engines first."
WHOLE = "Requests per s of runs that are not steady: over the whole run."
AXES = {RATE: Axis("offered load", "requests/s"), CLIENTS: Axis("closed loop", "clients")}
NOTE = (
    "Bound and rates are of the same requests, those that finished in the middle of a run; the bound drawn "
    "is the median over loads, so a point may lie a little above it."
)


def against_load(scenes: Sequence[Scene]) -> list[Figure]:
    order = list(dict.fromkeys(name for scene in scenes for name in scene.runs))
    bounds = [scene.bound.rate for scene in scenes if scene.bound]
    # None where a swept word gives every scene its own.
    bound = float(np.median(bounds)) if bounds and max(bounds) < 1.2 * min(bounds) else None
    marks = [Mark(f"bound: {number(bound)}", bound, "y")] if bound else []
    kind = scenes[0].load.kind
    offered, what = kind == RATE, "load" if kind in AXES else kind
    served = _series(scenes, order, SERVED)
    loads = np.array([scene.load.value for scene in scenes])
    diagonal = [Series("as offered", loads, loads, 7)] if offered else []
    bends = "bends away from what is offered" if offered else "stops rising"
    look = f"Where a curve {bends}, the engine is full; dashed: the theoretical bound."
    along = AXES.get(kind, Axis(kind))
    chart = Chart(along, Axis("served", "requests/s", low=0.0), [*diagonal, *served], marks)
    figures = [chart.figure(f"Requests served against {what}", look, NOTE if bound else "")]
    if any(metrics.goodput for scene in scenes for metrics in scene.metrics.values()):
        kept = _series(scenes, order, GOODPUT)
        up = Axis("with every promise kept", "requests/s", low=0.0)
        look = "Past its top, more load means fewer requests served well."
        figures.append(Chart(along, up, [*diagonal, *kept], marks).figure(f"Goodput against {what}", look))
    return [*figures, *_latencies(scenes, order, along, what)]


def _latencies(scenes: Sequence[Scene], order: Sequence[str], along: Axis, what: str) -> Iterator[Figure]:
    reads: dict[str, tuple[Read, str]] = {
        "p99 TTFT": (lambda found: Estimate(found.ttft.p99), "Where it turns upward, queues begin."),
        "mean TPOT": (lambda found: found.tpot.mean, "Fuller steps take longer: it rises before TTFT."),
        "p99 ITL": (lambda found: Estimate(found.itl.p99), "How long prompts interrupt answers that run."),
    }
    for name, (read, look) in reads.items():
        values = np.concatenate([each.y for each in _series(scenes, order, read)])
        if np.any(np.isfinite(values) & (values > 0)):
            scale, unit = time_unit(float(np.nanmedian(values)))
            chart = Chart(along, Axis(name, unit, LOG), _series(scenes, order, read, scale))
            yield chart.figure(f"{name} against {what}", look)


def load_grid(scenes: Sequence[Scene]) -> Grid:
    promised = any(found.goodput for scene in scenes for found in scene.metrics.values())
    head = next((scene.compared.head for scene in scenes if len(scene.runs) > 1), POLICIES.head)
    heads: tuple[str, ...] = ("load", head, "requests\nper s", "95 % interval")
    heads += ("goodput",) if promised else ()
    heads += ("TTFT\nmean, ms", "TTFT\np50, ms", "TTFT\np95, ms", "TTFT\np99, ms", "TPOT\nmean, ms")
    heads += ("ITL\np99, ms", "busy")
    rows, reasons, above = list[Row](), dict[str, dict[str, None]](), ""
    doubts = [_not_compared(scene) for scene in scenes]
    for scene, doubt in zip(scenes, doubts, strict=True):
        place = scene.place or scene.load.short
        for why in doubt.values():
            reasons.setdefault(why, {})[place] = None
        if scene.bound and any(scene.served(name).value > scene.bound.rate for name in doubt):
            above = f"At {place}: {bounded(scene, scene.bound.rate)}"
        for name, own in scene.runs.items():
            rate = scene.served(name)
            mark = (NOT_COMPARED if name in doubt else " ") if any(doubts) else ""
            served = valued(f"{number(rate.value)}{mark}", rate.value)
            kept = _over_seeds(own, lambda found: found.goodput.share if found.goodput else UNKNOWN)
            good = [share(kept.value)] if promised else []
            times = (1000 * _over_seeds(own, read).value for read in TIMES)
            busy = share(_over_seeds(own, lambda found: Estimate(found.engine.utilisation)).value)
            at = Cell(place, scene.load.value)
            rows.append(row(at, name, served, Cell(interval(rate)), *good, *times, busy))
    minor = (heads[3], "TTFT\nmean, ms", "TTFT\np50, ms")
    every = [own for scene in scenes for own in scene.runs.values()]
    notes = [f"{NOT_COMPARED} Not compared per s, at {', '.join(at)}: {why}" for why, at in reasons.items()]
    notes += [above] if above else []
    notes += [SEVERAL] if any(len(own) > 1 for own in every) else []
    notes += [WHOLE] if any(unsteady(one) for own in every for one in own) else []
    return Grid("", heads, tuple(rows), tuple(notes), grouped=True, minor=minor)


SERVED: Read = lambda found: found.request_rate  # noqa: E731
GOODPUT: Read = lambda found: found.goodput.rate if found.goodput else UNKNOWN  # noqa: E731
TIMES: tuple[Read, ...] = (
    lambda found: found.ttft.mean,
    lambda found: Estimate(found.ttft.median),
    lambda found: Estimate(found.ttft.p95),
    lambda found: Estimate(found.ttft.p99),
    lambda found: found.tpot.mean,
    lambda found: Estimate(found.itl.p99),
)


def _over_seeds(own: Sequence[Measured], read: Read) -> Estimate:
    """Of one run as it is; of several their mean, with the interval that they give; see `served_rates`."""
    found = [read(one.metrics) for one in own]
    if read in (SERVED, GOODPUT) and any(map(unsteady, own)):
        kept = [one.metrics.goodput.share.value for one in own if one.metrics.goodput]
        return Estimate(Whole.of(own).rate * (1.0 if read is SERVED else float(np.mean(kept or math.nan))))
    if len(found) == 1:
        return found[0]
    return Spread.of_values(np.array([each.value for each in found])).estimate().cut()


def _series(scenes: Sequence[Scene], order: Sequence[str], read: Read, scale: float = 1.0) -> list[Series]:
    found = []
    for colour, name in enumerate(order):
        held = [scene for scene in scenes if name in scene.runs]
        each = [_over_seeds(scene.runs[name], read) for scene in held]
        y, low, high = scale * np.array([(one.value, one.low, one.high) for one in each], float).T
        x = np.array([scene.load.value for scene in held])
        found.append(Series(name, x, y, colour, "linked", low, high))
    return found


def comparable(scenes: Sequence[Scene]) -> list[Scene]:
    for kind in dict.fromkeys(scene.load.kind for scene in scenes if scene.load.kind != AT_ONCE):
        alike = [scene for scene in scenes if scene.load.kind == kind]
        if len({scene.load.value for scene in alike}) > 1:
            return sorted(alike, key=lambda scene: scene.load.value)
    return []


# -- distributions of what users wait for


class Latency(NamedTuple):
    """One kind of waiting: what a kind of requests was promised of it, the share of what, and its values."""

    name: str
    long: str
    promise: Callable[[dict[str, Any]], object]
    whose: str
    read: Callable[[Measured], Sample]
    look: str


def _per_request(field: str) -> Callable[[Measured], Sample]:
    def read(found: Measured) -> Sample:
        values = getattr(found.latencies, field)[found.window.keep]
        known = values[~np.isnan(values)]
        return Sample(known, np.ones(len(known), np.int64), True)

    return read


REQUESTS, TOKENS = "share of requests", "share of tokens"


def _between(kind: dict[str, Any], of: str) -> object:
    return kind.get("between_tokens") if between_kind(kind) == of else None


LATENCIES = (
    Latency("TTFT", "Time to first token", lambda kind: kind.get("first_token"), REQUESTS,
            _per_request("ttft"),
            "Further left is sooner; where a curve crosses 99 % is its p99."),
    Latency("ITL", "Time between two tokens", lambda kind: _between(kind, GAP), TOKENS,
            lambda found: found.gap_sample,
            "A step to the right near the top is a pause that few tokens, but many users, meet."),
    Latency("E2E", "From sending to the last token", lambda kind: None, REQUESTS, _per_request("e2e"),
            "All of it together; long outputs make the upper end."),
    Latency("TPOT", "Time per output token", lambda kind: _between(kind, MEAN), REQUESTS,
            _per_request("tpot"),
            "The pace at which a request's text appears, on average."),
)  # fmt: skip


def distributions(runs: Mapping[str, Sequence[Measured]]) -> list[Figure]:
    """One figure for each kind of waiting that any run has; TPOT only where promised. Seeds are pooled."""
    found = []
    for latency in LATENCIES:
        samples = {}
        for name, own in runs.items():
            values, weights, _ = map(np.hstack, zip(*map(latency.read, own), strict=True))
            if len(values):
                samples[name] = Sample(values, weights, True)
        if samples:
            kinds = [kind for own in runs.values() for kind in own[0].run.kinds]
            promises = _promised(kinds, latency.promise)
            if promises or latency.name != "TPOT":
                found.append(curves(latency, samples, list(runs), promises))
    return found


def curves(
    latency: Latency, samples: Mapping[str, Sample], order: Sequence[str], promises: Mapping[str, float]
) -> Figure:
    scale, unit = time_unit(float(np.median(next(iter(samples.values())).values)))
    series = []
    for name, sample in samples.items():
        values, shares = distribution(sample.values * scale, sample.weights)
        series.append(Series(name, np.maximum(values, 1e-6), shares, order.index(name)))
    top = max(float(each.y[-1]) for each in series)
    limits = {of: scale * value for of, value in promises.items()}
    marks = [Mark(f"promised: {limit:g} {unit}{of}", limit) for of, limit in limits.items()]
    y = Axis(latency.whose, "%", TAIL, LOWEST, min(HIGHEST, max(top, 0.9)))
    chart = Chart(Axis(latency.name, unit, LOG), y, series, marks)
    return chart.figure(f"{latency.long} ({latency.name})", latency.look)


def _promised(
    kinds: Sequence[dict[str, Any]], promise: Callable[[dict[str, Any]], object]
) -> dict[str, float]:
    """What was promised, by the words behind it; kinds with the same promise share a line."""
    promised: dict[float, dict[str, None]] = {}
    for kind in kinds:
        value = promise(kind)
        if isinstance(value, int | float):
            promised.setdefault(float(value), {})[str(kind.get("name", ""))] = None
    said = {value: ", ".join(filter(None, names)) for value, names in promised.items()}
    return {f" ({names})" if names else "": value for value, names in said.items()}
