"""How much work without a promise fits beside the classes that have one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil, inf, nan
from typing import Any, NamedTuple

import numpy as np

from headgate.advisor.capacity.traffic import BOUND_FROM, LONGEST_BESIDE, Level, SearchTraffic, measure
from headgate.advisor.capacity.trials import Case, Chosen, Contender
from headgate.advisor.set_up import Asked, SearchPlan, SetUp, offered_rate, set_up, without_load
from headgate.core.errors import InputError, RunError
from headgate.cost.card import load_card
from headgate.experiment.build import make_engine
from headgate.experiment.run import DEFAULT_ROUTER
from headgate.experiment.settings import ClassSettings, Experiment
from headgate.experiment.workers import as_they_end
from headgate.methods.bounds import Requests, engine_bound
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.stats.figures import Estimate, Spread
from headgate.stats.flow import FILLS, STAYS
from headgate.stats.metrics import served_by, summarise, without_nan

REQUESTS = 1500  # of the promised classes, of a run
WARM_UP = 0.2  # of the time in which they come: clients begin all at once
DRAWN_AT = 10.0  # requests a second, where only lengths are wanted
BISECTIONS = 40
STATISTICS = {"ttft": "p95", "tbt": "p99", "tpot": "p95", "envelope": "p95"}  # of a promise of a class


class BesideOutcome(NamedTuple):
    ratio: float
    worst: str
    values: tuple[float, ...]
    tokens: float = 0.0  # per second
    kept: float = nan  # share of promised requests with every promise kept
    unanswered: int = 0  # promised requests that never got a token
    evictions: int = 0  # of the class without a promise
    seconds: float = nan  # that tokens were counted in
    stay: float = nan  # mean seconds from arrival to end, of the class without a promise


@dataclass(frozen=True)
class PolicyBeside:
    policy: str
    tokens: Estimate  # per second
    share: float  # of the bound
    missed: str  # "": every level was kept with every seed
    kept: float
    values: dict[str, float]
    unanswered: int
    evictions: float
    seconds: float  # counted in the shortest run
    stay: float  # mean seconds of a request of the class without a promise


@dataclass(frozen=True)
class BesidePlan(SearchPlan):
    """The answer of `headgate plan capacity --find batch`. Tokens are prompts and outputs."""

    name: str  # of the class without a promise
    clients: int
    rate: float  # of the promised classes
    requests: int  # of these in a run
    engines: int
    bound: float  # tokens a second that no policy exceeds beside them
    promised_bound: float  # requests a second of the promised classes alone
    found: tuple[PolicyBeside, ...]

    @property
    def best(self) -> PolicyBeside | None:
        kept = [each for each in self.found if not each.missed]
        return max(kept, key=lambda each: each.tokens.value, default=None)

    def as_dict(self) -> dict[str, Any]:
        document = super().as_dict() | {
            "class": self.name,
            "clients": self.clients,
            "rate": self.rate,
            "engines": self.engines,
            "requests_per_run": self.requests,
            "bound": {"tokens_per_second": self.bound, "requests_alone": self.promised_bound},
            "best": self.best.policy if self.best else None,
            "policies": [asdict(each) for each in self.found],
        }
        return dict(without_nan(document | self.ending()))


def plan_beside(settings: Experiment, chosen: Chosen, asks: Asked, notes: Sequence[str] = ()) -> BesidePlan:
    engines = settings.engines or 1
    asks = asks._replace(levels=with_promises(settings, asks.levels))
    share = unpromised(settings, asks.levels)
    start = set_up(_from_clients(without_load(settings), share), asks, REQUESTS)
    rate = offered_rate(settings, start.traffic)
    if rate is None:
        raise InputError(f"--find batch: give --rate, of the requests that {share.name} comes beside")
    part = 1.0  # of the rate, of the others: a class that becomes clients takes its share with it
    if not share.clients:
        shares = [(each.name, each.share or 0.0) for each in settings.classes]
        part = sum(own for name, own in shares if name != share.name) / sum(own for _, own in shares)
    rate *= part
    clients = sum(each.clients or 0 for each in start.settings.classes if each.name == share.name)
    bound, alone = tokens_bound(start, rate / engines)
    found = _run_all(start, chosen, rate, engines, share.name, bound * engines)
    short = {STAYS * each.stay / each.seconds: each for each in found if 0 < each.seconds < STAYS * each.stay}
    enough = ceil(start.traffic.number(rate) * max(short, default=0) / 100) * 100
    fills = [f"{FILLS.format(each.seconds, each.stay)}: about {enough:,} would do" for each in short.values()]
    return BesidePlan(
        start=start,
        traffic=start.traffic,
        notes=(
            *notes,
            *_rate_notes(start.traffic, share.name, rate, part),
            *start.notes(fleet=engines > 1),
            *fills[:1],
        ),
        interrupted=False,
        name=share.name,
        clients=clients,
        rate=rate,
        requests=start.traffic.number(rate),
        engines=engines,
        bound=bound * engines,
        promised_bound=alone * engines,
        found=found,
    )


def with_promises(settings: Experiment, levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """The levels, and what classes of a mix are promised where no level says so: `STATISTICS` of it."""
    own = [
        Level(metric, limit, statistic, share.name)
        for share in settings.classes
        for metric, statistic in STATISTICS.items()
        if (limit := getattr(share, metric))
        and not any(each.metric == metric and each.kind in ("", share.name) for each in levels)
    ]
    if not own and not levels:
        raise InputError(
            "--find batch: nothing is promised; give --slo, or ttft and tbt in a class of the mix"
        )
    return (*levels, *dict.fromkeys(own))  # a class may be there once for each tenant


def unpromised(settings: Experiment, levels: Sequence[Level]) -> ClassSettings:
    def promised(share: ClassSettings) -> bool:
        own = any(getattr(share, metric) for metric in STATISTICS)
        return not share.background and (own or any(each.kind in ("", share.name) for each in levels))

    found = [share for share in settings.classes if not promised(share)]
    if not found:
        raise InputError(
            "--find batch: no class is without a promise; give --mix with a class that has background = true"
        )
    if len(every := dict.fromkeys(share.name for share in found)) > 1:  # one may be there for each tenant
        names = ", ".join(every)
        raise InputError(f"--find batch asks about one class without a promise, there are {names}; leave one")
    if len(found) == len(settings.classes) and settings.trace is None:
        raise InputError(f"--find batch: nothing comes beside {found[0].name}; add a class with a promise")
    return found[0]


def _from_clients(settings: Experiment, share: ClassSettings) -> Experiment:
    """The class from clients that always have work: its own, or one a slot, by the shares of its tenants."""
    if share.clients:
        return settings
    own = [each for each in settings.classes if each.name == share.name]
    total = sum(each.share or 1.0 for each in own)
    many = make_engine(settings, load_card(settings.card)).running * (settings.engines or 1)

    def sent(each: ClassSettings) -> ClassSettings:
        clients = max(1, round(many * (each.share or 1.0) / total))
        return each.model_copy(update={"clients": clients, "share": None})

    classes = tuple(sent(each) if each in own else each for each in settings.classes)
    return settings.model_copy(update={"classes": classes})


def _rate_notes(traffic: SearchTraffic, name: str, rate: float, part: float) -> Iterator[str]:
    if part < 1:
        yield (
            f"{name} has {100 * (1 - part):.3g} % of the rate and comes from clients instead; the others "
            f"come at {rate:.4g} requests/s"
        )
    if (requests := traffic.number(rate)) < traffic.requests:
        yield (
            f"runs have {requests:,} requests with a promise, not {traffic.requests:,}: beside clients a run "
            f"lasts {LONGEST_BESIDE:g} s at most"
        )


def tokens_bound(start: SetUp, rate: float) -> tuple[float, float]:
    """Tokens a second of the class without a promise that no policy exceeds on one engine beside so many
    requests of the others, and the most of those alone. Promises are not counted, so it is a little high.
    """
    engine, traffic = start.engine, start.traffic
    others = traffic.lengths(engine)
    rows = replace(traffic, words=_with_many(traffic.words), requests=1).at(DRAWN_AT, start.settings.seed)
    mine = (rows.clients > 0) & (rows.prompt < engine.longest)
    if not mine.any():
        raise InputError("--find batch: no request of the class fits; raise --model-len or --kv-tokens")
    prompts = rows.prompt[mine]
    outputs = np.minimum(np.minimum(rows.output, rows.limit)[mine], engine.longest - prompts)
    return most_beside(engine, (others.prompts, others.decodes), prompts, outputs, rate)


def most_beside(
    engine: Engine, others: tuple[Any, Any], prompts: Any, outputs: Any, rate: float
) -> tuple[float, float]:
    both = np.append(others[0], prompts), np.append(others[1], outputs - 1)

    def total(share: float) -> float:
        weights = np.append(
            np.full(len(others[0]), (1 - share) / len(others[0])), np.full(len(prompts), share / len(prompts))
        )
        lengths = Requests.of(*both, weights).in_steps(engine.burst)
        return engine_bound(engine.cost, lengths, engine.running, engine.batch_tokens, engine.kv_tokens).rate

    alone, low, high = total(0.0), 0.0, 1.0
    if alone <= rate:
        return 0.0, alone
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) * (1 - middle) > rate else (low, middle)
    return total(low) * low * float((prompts + outputs).mean()), alone


def _with_many(words: Experiment) -> Experiment:
    """With so many clients that their first requests show the law of lengths, each tenant by its own."""
    total = sum(share.clients or 0 for share in words.classes)
    classes = tuple(
        share.model_copy(update={"clients": ceil(BOUND_FROM * share.clients / total)})
        if share.clients
        else share
        for share in words.classes
    )
    return words.model_copy(update={"classes": classes, "engines": None})


def _run_all(
    start: SetUp, chosen: Chosen, rate: float, engines: int, batch: str, bound: float
) -> tuple[PolicyBeside, ...]:
    trials = [(name, each, seed) for name, each in chosen.items() for seed in start.seeds]
    work = partial(_run_one, start.case(), rate, engines, batch, start.settings.router or DEFAULT_ROUTER)
    workers, outcomes = start.asks.options.workers, dict[tuple[str, int], BesideOutcome]()
    with start.asks.progress("beside batch", len(trials)) as report, workers.start(work, len(trials)) as pool:
        for (name, _, seed), outcome in as_they_end(pool, trials):
            outcomes[name, seed] = outcome
            report(len(outcomes))
    levels = [str(level) for level in start.traffic.levels if level.statistic]
    by_policy = {name: [outcomes[name, seed] for seed in start.seeds] for name in chosen}
    return tuple(_together(name, own, levels, bound) for name, own in by_policy.items())


def _run_one(
    case: Case, rate: float, engines: int, batch: str, router: str, trial: tuple[str, Contender, int]
) -> BesideOutcome:
    _, contender, seed = trial
    try:
        run = case.served(contender, rate, seed, engines, router)
    except RunError as error:
        return BesideOutcome(inf, f"the run stopped: {error}", ())
    kept = measure(run, case.traffic.levels)
    number = next(place for place, kind in enumerate(run.kinds) if kind["name"] == batch)
    mine = run.requests["kind"] == number
    figures = summarise(run)
    good = [kind for kind in figures.kinds if kind.goodput is not None and kind.measured]
    share = sum(kind.measured * kind.goodput.share.value for kind in good if kind.goodput)
    return BesideOutcome(
        ratio=kept.ratio,
        worst=str(kept.worst),
        values=kept.values,
        tokens=_tokens(run, mine),
        kept=share / sum(kind.measured for kind in good) if good else nan,
        unanswered=int(np.isnan(run.requests["first_token"][~mine]).sum()),
        evictions=int(run.requests["evictions"][mine].sum()),
        seconds=(1 - WARM_UP) * float(np.ptp(run.requests["arrival"][~mine])),
        stay=float(np.nanmean((run.requests["finished"] - run.requests["arrival"])[mine]))
        if mine.any()
        else nan,
    )


def _tokens(run: Run, mine: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
    """Per second of the time in which the others came, its beginning left out."""
    arrival = run.requests["arrival"][~mine]
    begin, end = float(arrival[0]), float(arrival[-1])
    times = np.array([begin + WARM_UP * (end - begin), end])
    if not times[1] > times[0]:
        return nan
    first, last = served_by(run, mine, times, output=1)
    return float((last - first) / (times[1] - times[0]))


def _together(name: str, own: Sequence[BesideOutcome], levels: Sequence[str], bound: float) -> PolicyBeside:
    tokens = Spread.of_values(np.array([each.tokens for each in own])).estimate().cut()
    missed = [each for each in own if not each.ratio <= 1]
    known = [each.values for each in own if each.values]
    return PolicyBeside(
        policy=name,
        tokens=tokens,
        share=tokens.value / bound if bound else nan,
        missed=max(missed, key=lambda each: each.ratio).worst if missed else "",
        kept=float(np.mean([each.kept for each in own])),
        values=dict(zip(levels, np.mean(known, axis=0).tolist(), strict=True)) if known else {},
        unanswered=sum(each.unanswered for each in own),
        evictions=float(np.mean([each.evictions for each in own])),
        seconds=min(each.seconds for each in own),
        stay=float(np.mean([each.stay for each in own])),
    )
