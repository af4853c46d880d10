"""The best policy, flags and number of engines for a promise, beside plain vLLM or SGLang at its own best.

Many flags are tried on short runs, the best of each policy on long ones, then engines are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil, inf
from typing import Any

from headgate.advisor.capacity import plan as capacity
from headgate.advisor.capacity.beside import BesidePlan, plan_beside
from headgate.advisor.capacity.plan import PLAIN
from headgate.advisor.capacity.traffic import Level, promised_gap
from headgate.advisor.capacity.trials import HOPELESS, Chosen, Contender, Race, remembered
from headgate.advisor.fewest_engines import MOST, FleetFound, make_ways, plan_engines, within_reach
from headgate.advisor.flags import (
    ENGINES,
    LARGE_GPU,
    EngineFlags,
    gap_budget,
    plan_flags,
    safe_mixed_slots,
    small_graphs,
    with_graphs,
)
from headgate.advisor.set_up import (
    Asked,
    OtherTimes,
    SetUp,
    offered_rate,
    other_question,
    other_rate,
    set_up,
    without_load,
)
from headgate.advisor.situation import card_situation
from headgate.core.errors import InputError
from headgate.cost.likeness import throughput_error
from headgate.experiment.run import DEFAULT_ROUTER, each_once
from headgate.experiment.settings import Experiment
from headgate.methods.bounds import Bound
from headgate.methods.make import make_policy, split_name
from headgate.stats.figures import Estimate
from headgate.stats.metrics import without_nan

REQUESTS = 3000  # of a run of the final at first, unless told otherwise
SHORT = 3  # runs of the first round have so many times fewer requests
COARSE = 0.1  # precision of the first round
FLAGS, PLAIN_FLAGS = 1, 3  # settings of a policy, and of vLLM's own scheduling, that are tried at length


@dataclass(frozen=True)
class Advised:
    policy: str
    settings: dict[str, Any]
    slots: int
    budget: int
    found: capacity.PolicyRate
    engines: int | None = None  # that bear the load; None where none is given, or too many are needed
    counted: bool = False  # whether engines were looked for
    fleet: FleetFound | None = None
    routers: dict[str, int | None] = field(default_factory=dict)  # engines with each that was tried
    notes: tuple[str, ...] = ()  # on the runs that counted them

    @property
    def name(self) -> str:
        return self.found.policy

    @property
    def text(self) -> str:
        return self.contender.text

    @property
    def contender(self) -> Contender:
        return Contender(self.policy, self.settings, (self.slots, self.budget))


@dataclass(frozen=True)
class Advice:
    """The answer of `headgate advise`. `best`, `plain` and `default` are among `final`, best rates first."""

    start: SetUp
    levels: tuple[Level, ...]
    bound: Bound
    load: float | None
    most: int  # engines
    first_round: tuple[capacity.PolicyRate, ...]
    final: tuple[Advised, ...]
    notes: tuple[str, ...]
    requests: int  # of a run of the final
    declined: capacity.Declined | None = None  # why the runs carry no answer
    other: OtherTimes | None = None  # the best one's rate with the other arrival times
    other_engines: int | None = None  # that bear the load then; only where the two rates are apart
    beside: BesidePlan | None = None  # what is left beside the load to a class without a promise

    @property
    def served_by(self) -> EngineFlags:
        return ENGINES[self.start.settings.engine]

    def is_plain(self, each: Advised) -> bool:
        """Whether it needs no plug-in; what SGLang's policy can be told are flags."""
        return is_plain(self.served_by.policy, each.policy, each.settings)

    @property
    def best(self) -> Advised:
        """The fewest engines, then the highest rate; the plain engine where none is significantly better, or
        not by more than the card may be off, which bounds what it says of engines, too.
        """
        counted = [each for each in self.final if each.counted] or self.final
        ranked = sorted(counted, key=lambda each: (each.engines or self.most + 1, -each.found.rate.value))
        first = ranked[0]
        plain, error = next((each for each in ranked if self.is_plain(each)), first), self.error
        if plain.engines != first.engines and not (error and plain.engines):
            return first
        return first if capacity.better(first.found, plain.found, error) else plain

    @property
    def error(self) -> float:
        return throughput_error(self.start.card)

    @property
    def untold(self) -> Advised | None:
        """What holds more than plain vLLM, the answer, by less than the card may be off."""
        first = max(self.final, key=lambda each: each.found.rate.value)
        return first if self.error and self.is_plain(self.best) and not self.is_plain(first) else None

    @property
    def plain(self) -> Advised:
        return max(filter(self.is_plain, self.final), key=lambda each: each.found.rate.value)

    @property
    def default(self) -> Advised:
        name, _ = plain_default(self.start)
        return next(each for each in self.final if self.is_plain(each) and each.name == name)

    def as_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "card": self.start.card.name,
            "workload": self.start.workload,
            "levels": [level._asdict() for level in self.levels],
            "load": self.load,
            "bound": self.bound.rate,
            "best": None if self.declined else self.best.name,
            "plain": self.plain.name,
            "default": self.default.name,
            "final": [asdict(each) for each in self.final],
            "first_round": [asdict(each) for each in self.first_round],
            "notes": self.notes,
        }
        if self.declined:
            document["declined"] = self.declined._asdict()
        if self.beside:
            document["beside"] = self.beside.as_dict()
        if self.other:
            document["other_times"] = {**self.other._asdict(), "engines": self.other_engines}
        return dict(without_nan(document))


def is_plain(own: str, policy: str, settings: Mapping[str, Any]) -> bool:
    return policy == own and (own != PLAIN or not settings)


def advise(settings: Experiment, named: Sequence[str], asks: Asked) -> Advice:
    """Policies that the user `named` are searched to the end, however few requests they serve."""
    levels, plain = asks.levels, ENGINES[settings.engine].policy
    policies = list(named or POLICIES[settings.engine])
    if plain not in policies:
        policies = [plain, *policies]
    if plain == SGLANG:
        policies = list(dict.fromkeys([*policies, *_sglang_flags(settings, levels)]))
    settings = with_graphs(settings, levels)
    start = set_up(without_load(settings), asks, REQUESTS)
    load = offered_rate(settings, start.traffic)
    bound, _ = start.bounds()
    if load is not None:
        within_reach(load, bound, asks.options.most_engines, "--engines-at-most")
    first, final, searched, notes = try_flags(start, policies, bound, load, named)
    name, _ = plain_default(start)  # of equals the first
    ranked = tuple(sorted(final, key=lambda each: (-each.found.rate.value, each.name != name)))
    most, requests = asks.options.most_engines, searched.traffic.requests
    advice = Advice(start, levels, bound, load, most, tuple(first), ranked, notes, requests)
    advice = replace(advice, declined=searched.declined(advice.best.found, load))
    if advice.declined:
        return advice
    if load is not None:  # engines are counted for every policy at its best flags, and vLLM at its defaults
        best = {each.text: each.name for each in reversed(ranked)}
        shown = {*best.values(), advice.default.name}
        routers = _routers(settings, start.traffic.shares_content(start.engine))
        counted = tuple(
            _counted(each, settings, asks, routers, load, requests) if each.name in shown else each
            for each in ranked
        )
        advice = replace(advice, final=counted)
        advice = replace(advice, beside=_left_beside(advice, settings, asks))
    return _at_other_times(advice, settings, asks)


def _left_beside(advice: Advice, settings: Experiment, asks: Asked) -> BesidePlan | None:
    best, plain = advice.best, advice.plain
    if not any(share.background for share in settings.classes) or not best.engines:
        return None
    shown = {each.name: each.contender for each in (best, plain)}
    if best.policy != KEEP:  # it is made for this
        tried = next((each for each in advice.final if each.policy == KEEP), replace(best, settings={}))
        name = tried.name if tried.policy == KEEP else KEEP
        shown[name] = tried.contender._replace(policy=KEEP)
    several = {"engines": best.engines, "router": best.fleet and best.fleet.router}
    fleet = settings.model_copy(update=several if best.engines > 1 else {"engines": None})
    return plan_beside(fleet, shown, asks)


def try_flags(
    start: SetUp, names: Sequence[str], bound: Bound, load: float | None, named: Sequence[str] = ()
) -> tuple[list[capacity.PolicyRate], list[Advised], capacity.Searched, tuple[str, ...]]:
    chosen = candidates(names, start, bound)
    default, contender = plain_default(start)
    chosen.setdefault(default, contender)
    capacity.refuse_impossible(start, bound.rate)
    own = ENGINES[start.settings.engine].policy
    fixed = {own, *(split_name(text)[0] for text in named)}
    first = _short(start, chosen, bound.rate, fixed)
    capacity.refuse_idle(first, start.traffic.levels)
    kept = {name: chosen[name] for name in _finalists(first, chosen, default, own, fixed)}
    known = {each.policy: each.rate.value for each in first}
    plain = frozenset(name for name, (policy, values, _) in kept.items() if is_plain(own, policy, values))
    length = capacity.Lengthening(start, kept, bound.rate, known=known, plain=plain, load=load)
    searched = length.search()
    if searched.left:
        raise KeyboardInterrupt
    capacity.refuse_idle(searched.found, start.traffic.levels)
    notes = [*start.notes(fleet=False), *capacity.at_the_edge(searched.found), *length.not_enough(searched)]
    policies = [contender.policy for contender in chosen.values()]
    notes += small_graphs(start.engine, start.traffic.levels, policies)
    notes += _left_out(first, chosen, kept)
    tried = [(*kept[found.policy], found) for found in searched.found]
    final = [Advised(policy, values, *(limits or (0, 0)), found) for policy, values, limits, found in tried]
    return first, final, searched, tuple(notes)


def _at_other_times(advice: Advice, settings: Experiment, asks: Asked) -> Advice:
    """The same with the rate, and where that is far off the engines, of the other arrival times."""
    best, rate = advice.best, advice.best.found.rate.value
    question = other_question(settings, asks, advice.requests)
    if question is None:
        return advice
    other = other_rate(question, best.name, rate, best.contender)
    if not other.apart or advice.load is None:
        return replace(advice, other=other)
    held = replace(best, engines=None, found=replace(best.found, rate=Estimate(other.other)))
    asked = question.settings.model_copy(update={"rate": advice.load, "scale_rate": None})
    routers = _routers(settings, question.shared and other.recorded)
    counted = _counted(held, asked, question.asks, routers, advice.load, advice.requests)
    return replace(advice, other=other, other_engines=counted.engines)


def _short(start: SetUp, chosen: Chosen, top: float, fixed: Collection[str]) -> list[capacity.PolicyRate]:
    """All of them roughly: one seed, few requests, and a wide bracket for the hopeless, if they are not among
    the `fixed` policies: plain vLLM, whose best flags are wanted, and those that the user named.
    """
    traffic, (_, options, progress, folder) = start.traffic, start.asks
    few = traffic if traffic.recorded else replace(traffic, requests=max(300, traffic.requests // SHORT))
    case, one_seed = start.case(few), start.seeds[:1]
    droppable = [name for name, contender in chosen.items() if contender.policy not in fixed]
    progress = partial(progress, "short runs of all flags")
    race = Race(case, top, COARSE, one_seed, droppable, options.workers, progress, remembered(folder, case))
    searches, answers, dropped = race.run(chosen, {})
    if any(search.next() is not None for (name, _), search in searches.items() if name not in dropped):
        raise KeyboardInterrupt
    return [
        capacity.put_together(name, searches, answers, top, few.levels, few.requests * (name in dropped))
        for name in chosen
    ]


def _finalists(
    first: Sequence[capacity.PolicyRate], chosen: Chosen, default: str, own: str, fixed: Collection[str]
) -> list[str]:
    most = max(each.rate.value for each in first)
    taken, kept = Counter[str](), list[str]()
    for each in sorted(first, key=lambda each: -each.rate.value):
        contender = chosen[each.policy]
        taken[contender.text] += 1
        enough = contender.policy in fixed or each.rate.value >= HOPELESS * most
        if taken[contender.text] <= (PLAIN_FLAGS if contender.policy == own else FLAGS) and enough:
            kept.append(each.policy)
    return list(dict.fromkeys([*kept, default]))


def _left_out(first: Sequence[capacity.PolicyRate], chosen: Chosen, kept: Chosen) -> list[str]:
    rising = sorted(first, key=lambda each: each.rate.value)
    best = {chosen[each.policy].text: each for each in rising}
    final = {contender.text for contender in kept.values()}
    out = []
    for text in best.keys() - final:
        rate, why = best[text].rate, best[text].limited_by
        known = f"{rate.value:.4g}" if rate.value or not best[text].dropped else f"< {rate.high:.4g}"
        out.append(f"{text} ({known} requests/s: {why} gives way first)")
    least = f"{100 * HOPELESS:.0f} % of {rising[-1].rate.value:.4g}: {', '.join(sorted(out))}"
    return [f"left out after short runs, below {least}; --policy searches one to the end"] if out else []


def _routers(settings: Experiment, shared: bool) -> list[str]:
    return [settings.router] if settings.router else [DEFAULT_ROUTER, *([BY_PREFIX] if shared else [])]


def _counted(
    each: Advised, settings: Experiment, asks: Asked, routers: Sequence[str], load: float, requests: int
) -> Advised:
    """The fewest engines with any of the routers, on runs as long as those of one; one engine needs none."""
    each = replace(each, counted=True)
    if not each.found.rate.value:
        return each
    fleet = settings.model_copy(update={"slots": each.slots, "budget": each.budget, "set": {}})
    if not asks.options.as_recorded:
        many = ceil(load / each.found.rate.value)
        fleet = fleet.model_copy(update={"requests": min(MOST, requests * many)})
    for router, (name, way) in zip(routers, make_ways(routers, [each.text], fleet).items(), strict=True):
        try:
            plan = plan_engines(fleet, {name: way}, asks, possible=True)
        except InputError:  # more engines than may be
            break
        if plan.interrupted:
            raise KeyboardInterrupt
        (found,) = plan.found
        each = replace(each, routers=each.routers | {router: found.engines})
        if each.fleet is None or (found.engines or inf) < (each.engines or inf):
            each = replace(each, engines=found.engines, fleet=found, notes=plan.notes)
        if each.engines == 1:
            break
    return each


# -- what is worth trying

KEEP = "keep"
BY_PREFIX = "prefix-aware"  # the router that is tried, too, where requests share content
SGLANG = "sglang"  # what SGLang does without one
POLICIES = {"vllm": (PLAIN, KEEP, "slai", "eb+"), "sglang": (SGLANG, KEEP, "eb+")}
BY_BUDGET = (PLAIN, SGLANG, "sarathi", "sarathi-spf", "v0")  # the budget is all that bounds their steps
USUAL_SLOTS = 256  # tried beside as many as memory is enough for
WITHOUT_GAP = (2048, 8192, 16384)  # budgets to try where no gap is promised
NEAR = (0.5, 1.0, 1.5)  # of the budget by formula
ASSUMED = 0.9  # of λ*: the rate that the formula for the budget is given


def candidates(policies: Sequence[str], start: SetUp, bound: Bound) -> Chosen:
    chosen: Chosen = {}
    most = most_slots(start)
    tried = [most] if start.settings.slots else sorted({min(USUAL_SLOTS, most), most})
    # None is there twice: what --set says may be among SGLang's own flags
    made = each_once("policy", policies, start.settings.set, lambda *each: (each, {"": object()}))
    for text, (name, values) in made.items():
        for slots in tried:
            for budget in _budgets(name, slots, start, bound):
                engine = start.engine._replace(running=slots, batch_tokens=budget)
                make_policy(name, values, engine)  # mistakes show before the work
                chosen[label(text, slots, budget)] = Contender(name, values, (slots, budget))
    return chosen


def label(policy: str, slots: int, budget: int) -> str:
    return f"{policy}, {slots} slots, {budget} tokens"


def plain_default(start: SetUp) -> tuple[str, Contender]:
    """The engine without a flag, on a GPU of this size; what the card was not meant for is cut."""
    engine = ENGINES[start.settings.engine]
    budget = min(engine.own[1], start.card.max_batch_tokens)
    slots = min(engine.own[0], start.card.max_running, budget // start.engine.width)
    return label(engine.policy, slots, budget), Contender(engine.policy, {}, (slots, budget))


def _sglang_flags(settings: Experiment, levels: Sequence[Level]) -> list[str]:
    """SGLang as its flags can make it: EB's threshold, mixed chunks, a decode step after each piece."""
    planned = plan_flags(settings).parameters
    kept = {key: value for key, value in planned.items() if key == "conservativeness"}
    tried = [planned, {"mixed_chunk": True, **kept}]
    if promised_gap(levels) is not None:
        tried.append({"prefill_decode_interval": 1, **kept})
    words = [",".join(f"{key}={str(value).lower()}" for key, value in each.items()) for each in tried]
    return [f"{SGLANG}:{word}" for word in words if word]


def formula_budget(slots: int, start: SetUp, gap: float, bound: Bound) -> int:
    lengths = start.traffic.lengths(start.engine).in_steps(start.engine.burst)
    prompt, output = float(lengths.prompts.mean()), float(lengths.decodes.mean()) + 1
    most = start.card.max_batch_tokens
    return gap_budget(start.engine.cost, prompt, output, ASSUMED * bound.rate, gap, slots, most)


def most_slots(start: SetUp) -> int:
    """As `plan flags` has them: what KV memory is enough for, within --slots or the card's own limit."""
    rows = start.settings if start.traffic.recorded else start.settings.model_copy(update={"requests": None})
    about, _ = card_situation(rows)
    slots = min(safe_mixed_slots(about), about.slots)
    if start.engine.speculation:  # drafts take budget too
        slots = min(slots, (start.settings.budget or start.card.max_batch_tokens) // start.engine.width)
    return slots


def _budgets(name: str, slots: int, start: SetUp, bound: Bound) -> list[int]:
    most = start.card.max_batch_tokens
    if start.settings.budget:
        if start.settings.budget < slots * start.engine.width:
            raise InputError(
                f"--budget {start.settings.budget} is below {slots} slots; give --slots, or a larger budget"
            )
        return [start.settings.budget]
    gap = promised_gap(start.traffic.levels)
    if name not in BY_BUDGET:
        wanted: Sequence[float] = (LARGE_GPU[1],)
    elif gap is None:
        wanted = WITHOUT_GAP
    else:
        formula = formula_budget(slots, start, gap, bound)
        wanted = [*(share * formula for share in NEAR), LARGE_GPU[1]]
    least = slots * start.engine.width
    return sorted({max(least, min(most, int(budget) // 256 * 256)) for budget in wanted})
