"""Commands that plan: `plan threshold`, `flags`, `speculation`, `capacity`, `fluid`, and `advise`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.advisor.settings import SEARCH, FleetSettings, LevelSettings, SearchSettings, StepSettings
from headgate.cli.flags import takes_settings
from headgate.cli.help import Application, GroupPage, Number, Text, Texts, offered, panelled, plugged_in
from headgate.cli.output import Json, Outputs, Report, bar, resting_on, said_to, save_page, tell, write_json
from headgate.core.durations import duration
from headgate.core.errors import InputError, RunInterruptedError, unknown
from headgate.experiment.settings import NAMED, POLICY, Experiment

if TYPE_CHECKING:
    from headgate.advisor.fewest_engines import EnginesPlan, Way
    from headgate.advisor.set_up import Asked, OtherTimes, SearchPlan
    from headgate.report.document import Page


class Plans(GroupPage):
    """`headgate plan wait` is plugged in."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(["wait"] if offered(WAIT) else [])]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return plugged_in(WAIT) if cmd_name == "wait" else super().get_command(ctx, cmd_name)


WAIT = "plan wait"
NO_ANSWER = 1  # exit code, as of a question that was answered with no
plan = Application(Plans, help="Plan thresholds, flags of vLLM or SGLang, capacity and fleets.")


@plan.command()
@takes_settings
def threshold(
    words: Experiment,
    max_gap: Annotated[Text, typer.Option(help="also plan for gaps no longer than this")] = None,
    json: Json = None,
    report: Report = None,
) -> None:
    """When to refill; whether mixed or exclusive batches serve more.

    Takes the settings of a run: a card and a workload, or a trace. Without a load (--clients, --rate, a
    trace's own times) the engine is taken to be saturated.

    Examples:
      headgate plan threshold --prompt 512 --output 256 --clients 1024 --slots 512
      headgate plan threshold --trace azure-conv --scale-rate 4 --max-gap 100ms
    """
    from headgate.advisor.situation import situation
    from headgate.advisor.threshold import plan_threshold
    from headgate.experiment.run import MIXED, SATURATED, arrivals_said, assumed, outside_said
    from headgate.report.plans.threshold import threshold_page

    bound = None if max_gap is None else duration(max_gap)
    if bound is not None and not bound > 0:
        raise InputError(f"--max-gap {max_gap}: it must be above 0, or left out for no bound")
    found = plan_threshold(situation(words), bound)
    setup = assumed(words, arrivals_said(words, SATURATED), run=False)
    outside = outside_said(words, MIXED, min(found.situation.load.rate or inf, found.mixed.rate))
    page, lost = threshold_page(found, sys.argv[1:]), found.situation.lost
    tell(page, found.as_dict(), Outputs(json, report), setup, lost, [outside])


@plan.command()
@takes_settings
def speculation(words: Experiment, json: Json = None, report: Report = None) -> None:
    """Speculative decoding on or off, and how many drafts, at a load.

    Simulates the load with 0 up to as many drafts as --speculate names, computes the best number for each
    batch size from the card, and prints vLLM's schedule, num_speculative_tokens_per_batch_size. A card that
    was not measured with speculation knows gains "at most".

    Examples:
      headgate plan speculation --speculate 5:accept=0.7 --rate 8
      headgate plan speculation --speculate 3:accept=0.6,spread=12 --trace azure-conv
          --card derived:llama-3.3-70b@h200:tp4 --requests 1000
    """
    from headgate.advisor.drafts import plan_drafts
    from headgate.experiment.run import arrivals_said, assumed
    from headgate.report.plans.flags import drafts_page

    found = plan_drafts(words)
    tell(
        drafts_page(found, sys.argv[1:]),
        found.as_dict(),
        Outputs(json, report),
        assumed(words, arrivals_said(words)),
    )


# -- what commands that search have in common


LEVELS = "service levels, such as ttft=500ms@p50,tbt=100ms@p99:paying"
Levels = Annotated[Texts, panelled(LEVELS, SEARCH)]


@plan.command()
@takes_settings
def flags(
    words: Experiment,
    slo: Levels = None,
    check: Annotated[bool, typer.Option(help="simulate the advice and the engine's defaults")] = False,
    json: Json = None,
    report: Report = None,
) -> None:
    """What to set in plain vLLM or SGLang, and why.

    Slots come from KV memory and the TPOT target, the token budget from that target, the queue limit from the
    TTFT target. --slots and --budget, where given, are the most to advise. With --engine sglang the flags are
    SGLang's: exclusive batches with EB's threshold, or mixed chunks where they serve more; --slo says a gap,
    which pieces of prompts keep. `headgate advise --policy mixed` searches vLLM's flags for a promise.

    Examples:
      headgate plan flags --trace azure-conv --tpot 50ms --ttft 500ms
      headgate plan flags --engine sglang --prompt 512 --output 256 --check
      headgate plan flags --prompt 512 --output 256 --tpot 40ms --check
    """
    from headgate.advisor.capacity.traffic import parse_levels, promised_gap
    from headgate.advisor.flags import check_flags, plan_flags
    from headgate.experiment.run import MIXED, SATURATED, arrivals_said, assumed, outside_said
    from headgate.report.plans.flags import check_section, flags_page
    from headgate.report.terminal import show

    if slo and words.engine == "vllm":
        raise InputError(
            "plan flags takes --slo with --engine sglang; headgate advise --policy mixed searches vLLM's"
        )
    gap = promised_gap(parse_levels(slo)) if slo else None
    if slo and gap is None:
        raise InputError("--slo promises no gap; give one, such as tbt=100ms@p99, or drop --slo")
    found = plan_flags(words, gap)
    setup = assumed(words, arrivals_said(words, SATURATED), run=check, limits=False)
    say, page, lost = said_to(json), flags_page(found, sys.argv[1:]), found.situation.lost
    document = lost.before(found.as_dict())
    served = min(found.situation.load.rate or inf, found.rate)
    alarms = (lost.said, found.overloaded(), outside_said(words, MIXED, served))
    show(resting_on(page, setup, alarms), say)
    if check:
        runs, load = check_flags(words, found, bar)
        document["check"] = {"load": load, "runs": [run.as_dict() for run in runs]}
        checked = check_section(runs, load, found)
        print(file=say)
        show(checked, say)
        page = flags_page(found, sys.argv[1:], [checked])
    save_page(resting_on(page, setup, alarms), report, say)
    write_json(json, document)


# -- plan capacity

RATE, ENGINES, BATCH = "rate", "engines", "batch"
BESIDE = ("keep", "mixed")  # policies that share an engine with batch unless others are named
FIND = "rate: of one engine; engines: how few bear the load; batch: what fits beside --rate"
ROUTERS = "with --find engines (default: least-loaded); may be repeated"
Policies = Annotated[Texts, panelled(f"{NAMED} or all; may be repeated", POLICY)]
REFUSED = ("clients", "patience", "abort", "ttft", "tbt", "tpot", "envelope")  # in every search
Cache = Annotated[Text, panelled("folder of answers from before; none: use none", SEARCH)]


@plan.command()
@partial(takes_settings, hidden=REFUSED)
def capacity(
    words: Experiment,
    search: SearchSettings,
    slo: Levels = None,
    policy: Policies = None,
    find: Annotated[str, panelled(FIND, SEARCH)] = RATE,
    engines: Annotated[Number, panelled("with --find batch (default: 1)", SEARCH, min=1)] = None,
    router: Annotated[Texts, panelled(ROUTERS, SEARCH)] = None,
    cache: Cache = None,
    json: Json = None,
    report: Report = None,
) -> None:
    """The largest rate or the fewest engines for service levels.

    λ* is the rate beyond which every policy falls behind. Each policy is simulated at rates between zero and
    λ*, by bracketing, with several seeds in parallel. With --find engines the load is given (a trace's own,
    --scale-rate or --rate) and fleets are simulated at token level, from load / λ* engines up, under every
    --router with every --policy. With --find batch the load is given, too, and the answer is how many tokens
    a second of a class without a promise fit beside it; where --slo says nothing, 95 % of the first tokens
    and 99 % of the gaps of each class must keep what the mix promises. A level is METRIC=TIME@STATISTIC:CLASS
    with the metrics ttft, tbt (every gap between two tokens), of a request gap (the longest), tpot (the
    mean), envelope (the time per token from when the first was due) and e2e, the statistics p50, p99, ...
    mean and max, and a class or all requests. Without a statistic it is a promise that policies know of and
    that is not checked.

    Examples:
      headgate plan capacity --slo ttft=500ms@p50,tbt=100ms@p99 --policy mixed --policy v0 --prompt 1000
          --output 200
      headgate plan capacity --slo ttft=500ms@p50,tbt=100ms@p99:paying,tbt=500ms:free
          --classes paying=5%,free=95% --trace sharegpt-8k --policy sarathi --policy slai
          --card pub-rtx-ada-6000-mistral-7b --slots 128 --budget 512
      headgate plan capacity --slo e2e=20s@p95 --policy all --trace azure-conv --seeds 2
      headgate plan capacity --find engines --slo ttft=500ms@p95,tpot=40ms@p95 --trace azure-conv
          --scale-rate 30 --router least-loaded --policy mixed --policy eb+
      headgate plan capacity --find batch --mix chat-and-batch.toml --rate 12
    """
    from headgate.advisor.flags import with_graphs

    outputs = Outputs(json, report)
    asks, policies = asked("plan capacity", words, search, slo, policy, cache, needed=find != BATCH)
    if find == BATCH:
        words = words.model_copy(update={"engines": engines})
    elif engines:
        raise InputError("--engines is about --find batch; --find engines says how many are needed")
    else:
        words, policies = with_graphs(words, asks.levels), policies or [words.policy]
    with _goes_on(asks):
        if find == BATCH:
            _find_batch(words, router or [], policies, asks, outputs)
        elif find == ENGINES:
            _find_engines(words, router or [], policies, asks, outputs)
        elif find != RATE:
            raise unknown("thing to --find", find, (RATE, ENGINES, BATCH))
        elif router:
            raise InputError("--router is about fleets; say --find engines, or drop it")
        else:
            _find_rate(words, policies, asks, outputs)


def _find_rate(words: Experiment, policies: list[str], asks: Asked, outputs: Outputs) -> None:
    from headgate.advisor.capacity.plan import choose, plan_capacity, refuse_idle
    from headgate.advisor.set_up import other_question, other_rate
    from headgate.experiment.run import assumed, outside_said, tried_arrivals
    from headgate.report.plans.capacity import apart_said, capacity_page

    found = plan_capacity(words, policies, asks)
    if not found.interrupted:
        refuse_idle(found.found, asks.levels)
    setup = assumed(words, tried_arrivals(asks.options.as_recorded) + found.start.unshared)
    best, other, outside = None if found.declined else found.best, None, ""
    if best is not None:
        outside = outside_said(words, best.policy, best.rate.value)
        question = None if found.interrupted else other_question(words, asks, found.traffic.requests)
        if question is not None:
            chosen, _ = choose([best.policy], words, found.start.engine)
            other = other_rate(question, best.policy, best.rate.value, chosen[best.policy])
    alarms = apart_said(other, "sustains"), outside
    _tell_search(found, other, capacity_page(found, sys.argv[1:]), outputs, setup, alarms)
    if found.declined:
        raise typer.Exit(NO_ANSWER)


def _find_batch(
    words: Experiment, routers: list[str], policies: list[str], asks: Asked, outputs: Outputs
) -> None:
    from headgate.advisor.capacity.beside import plan_beside, with_promises
    from headgate.advisor.capacity.plan import choose
    from headgate.advisor.flags import with_graphs
    from headgate.cost.card import load_card
    from headgate.experiment.build import make_engine
    from headgate.experiment.run import assumed, tried_arrivals
    from headgate.report.plans.capacity import beside_page

    if len(routers) > 1 or (routers and words.engines is None):
        raise InputError("--find batch takes one --router, with --engines; drop the others")
    if routers:
        words = words.model_copy(update={"router": routers[0]})
    words = with_graphs(words, with_promises(words, asks.levels))
    engine = make_engine(words, load_card(words.card))
    chosen, notes = choose(policies or list(BESIDE), words, engine)
    found = plan_beside(words, chosen, asks, notes)
    come = f"{tried_arrivals(asks.options.as_recorded, found.rate)} with a promise"
    come += f", beside {found.clients:,} clients of {found.name}"
    setup = assumed(words, come, fleet=found.engines > 1)
    _tell_search(found, None, beside_page(found, sys.argv[1:]), outputs, setup, [])


def _tell_search(
    found: SearchPlan, other: OtherTimes | None, page: Page, to: Outputs, setup: str, alarms: Sequence[str]
) -> None:
    document = found.as_dict() | ({"other_times": other._asdict()} if other else {})
    tell(page, document, to, setup, found.traffic.lost, alarms)
    if found.interrupted:
        raise KeyboardInterrupt


# -- plan capacity --find engines


def _find_engines(
    words: Experiment, routers: list[str], policies: list[str], asks: Asked, outputs: Outputs
) -> None:
    from headgate.advisor.fewest_engines import make_ways, out_of_reach, plan_engines
    from headgate.experiment.run import DEFAULT_ROUTER, assumed, outside_said, tried_arrivals
    from headgate.report.plans.capacity import apart_said, engines_page

    wanted = routers or list(words.routers) or [words.router or DEFAULT_ROUTER]
    ways = make_ways(wanted, policies, words)
    found = plan_engines(words, ways, asks)
    other = _engines_at_other_times(words, asks, ways, found)
    setup = assumed(words, tried_arrivals(asks.options.as_recorded, found.rate), fleet=True)
    best = found.best
    outside = outside_said(words, best.policy, found.rate / best.engines) if best and best.engines else ""
    alarms = apart_said(other, "needs", "engines"), outside
    _tell_search(found, other, engines_page(found, sys.argv[1:]), outputs, setup, alarms)
    if advice := out_of_reach(found):
        raise InputError(advice)


def _engines_at_other_times(
    words: Experiment, asks: Asked, ways: dict[str, Way], found: EnginesPlan
) -> OtherTimes | None:
    from headgate.advisor.fewest_engines import plan_engines
    from headgate.advisor.set_up import OtherTimes, other_question

    best = found.best
    question = None if found.interrupted else other_question(words, asks, found.traffic.requests)
    if question is None or best is None or best.engines is None:
        return None
    settings, others, own, shared = question
    # its first requests alone may be faster or slower
    settings = settings.model_copy(update={"rate": found.rate, "scale_rate": None})
    (again,) = plan_engines(settings, {best.name: ways[best.name]}, others, possible=True).found
    if again.engines is None:
        return None
    recorded = others.options.as_recorded
    return OtherTimes(best.name, recorded, best.engines, again.engines, found.rate / own, shared)


def asked(
    command: str,
    words: Experiment,
    search: SearchSettings,
    slo: list[str] | None,
    policies: Sequence[str] | None = None,
    cache: str | None = None,
    needed: bool = True,
) -> tuple[Asked, list[str]]:
    from headgate.advisor.capacity.memory import chosen_folder
    from headgate.advisor.capacity.traffic import parse_levels
    from headgate.advisor.set_up import Asked

    if not slo and needed:
        raise InputError(f"{command} needs a promise, such as --slo ttft=1s@p95,tbt=100ms@p99")
    options = search.model_copy(update={"jobs": search.jobs or os.cpu_count() or 1})
    asks = Asked(parse_levels(slo) if slo else (), options, partial(bar, begun=set()), chosen_folder(cache))
    return asks, list(policies or words.policies)


@contextmanager
def _goes_on(asks: Asked) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        kept = f"interrupted; what was found is kept in {asks.folder}: the same command goes on from there"
        raise RunInterruptedError(kept if asks.folder and asks.folder.is_dir() else "interrupted") from None


# -- plan fluid


@plan.command()
@takes_settings
def fluid(
    words: Experiment,
    fleet: FleetSettings,
    steps: StepSettings,
    levels: LevelSettings,
    json: Json = None,
    report: Report = None,
) -> None:
    """Split a fleet between prompts and decodes; what an engine adds.

    Says which requests to serve. Solves the steady-state linear program of gate-and-route for classes of
    requests: --class flags, the classes of an experiment file with --rate, a trace cut into classes by prompt
    and output length, or the log of a router. Rates are those of the whole fleet.

    Examples:
      headgate plan fluid --engines 20 --mixed-fixed 17.4ms --mixed-per-token 6.2e-5 --solo-step 22ms
          --patience 10s --class code:prompt=300,output=1000,rate=10
          --class paper:prompt=3000,output=400,rate=10
      headgate plan fluid --engines 8 --trace azure-conv --scale-rate 30 --clusters 4
      headgate plan fluid --engines 8 --slots 128 --trace azure-code --scale-rate 20 --tpot 30ms
      headgate plan fluid --engines 8 --from-log router.jsonl
    """
    from headgate.advisor.fluid_plan import make_fluid_plan
    from headgate.experiment.run import MIXED, arrivals_said, assumed, outside_said
    from headgate.report.plans.fluid import fluid_page

    found = make_fluid_plan(words, fleet, steps, levels)
    setup = "" if steps.costs else assumed(words, arrivals_said(words, "rates of the classes"), run=False)
    described = not (steps.costs or fleet.classes or fleet.from_log)  # by settings that a run can take
    outside = (
        outside_said(words, MIXED, sum(flow.rate for flow in found.plan.instance.flows)) if described else ""
    )
    page, lost = fluid_page(found, sys.argv[1:]), found.demand.lost
    tell(page, found.as_dict(), Outputs(json, report), setup, lost, [outside])


# -- advise


MODEL = "the model, for the lines to paste (default: the card's)"
MOST_ENGINES = 32
RENAME = (
    "give a card of that model, or call the card's model so (headgate card derive --config FILE --model NAME)"
)


def _for_turns(words: Experiment) -> str:
    """The command that answers for conversations, with the flags that were given."""
    typed = sys.argv[sys.argv.index("advise") + 1 :] if "advise" in sys.argv else []
    given = [word.replace("--engines-at-most", "--most-engines") for word in typed]
    fleet = ["--find", "engines"] if words.rate else []
    routers = [] if words.router or not fleet else ["--router", "prefix-aware", "--router", "least-loaded"]
    return re.sub(r" --model[ =]\S+", "", join(["headgate", "plan", "capacity", *fleet, *given, *routers]))


@partial(takes_settings, hidden=(*REFUSED, "turns", "think", "most_engines"))
def advise(
    words: Experiment,
    search: SearchSettings,
    slo: Levels = None,
    policy: Annotated[Texts, panelled(f"{NAMED}; may be repeated", POLICY)] = None,
    engines_at_most: Annotated[Number, panelled("look no further (default: 32)", SEARCH, min=1)] = None,
    model: Annotated[Text, typer.Option(help=MODEL)] = None,
    cache: Cache = None,
    json: Json = None,
    report: Report = None,
) -> None:
    """Say which policy, flags and engines keep your latency promises.

    Prints the lines to paste. Tries policies (mixed, keep, slai and eb+ unless --policy names others) with
    several max_num_seqs and max_num_batched_tokens on short runs, then the best flags of each on long ones,
    and the fewest engines where one does not bear the load: a trace's own, --scale-rate or --rate. Plain vLLM
    at its own best flags and at its defaults stands beside the answer; with --engine sglang it is SGLang,
    whose flags are tried, too. Answers are kept under ~/.cache/headgate, so that a second question is quick.
    A level is METRIC=TIME@STATISTIC:CLASS, as for `headgate plan capacity`.

    Examples:
      headgate advise --trace azure-conv --slo ttft=1s@p95,tbt=100ms@p99
      headgate advise --trace azure-conv --scale-rate 10 --slo ttft=1s@p95,tbt=100ms@p99 --engines-at-most 32
      headgate advise --prompt 1000 --output 200 --rate 15 --slo ttft=500ms@p95 --policy keep --policy slai
      headgate advise --card derived:llama-3.1-70b@h200:tp4 --prompt 1000 --output 200 --rate 30
          --slo ttft=2s@p95 --policy keep --seeds 1 --requests 600  # a first look, in a minute
    """
    from headgate.advisor.advice import advise as find
    from headgate.cost.card import load_card
    from headgate.cost.likeness import other_model
    from headgate.experiment.run import assumed, tried_arrivals
    from headgate.report.plans.advise import advice_page, other_said

    if words.turns:
        raise InputError(f"advise draws single requests, no conversations; ask {_for_turns(words)}")
    asks, policies = asked("advise", words, search, slo, policy, cache)
    told = search.most_engines if "most_engines" in search.model_fields_set else MOST_ENGINES
    options = asks.options.model_copy(update={"most_engines": engines_at_most or told})
    asks = asks._replace(options=options)
    if model and (why := other_model(load_card(words.card), model, RENAME)):
        raise InputError(why)
    with _goes_on(asks):
        found = find(words, policies, asks)
    setup = assumed(words, tried_arrivals(search.as_recorded) + found.start.unshared, limits=False)
    page = advice_page(found, model, sys.argv[1:])
    tell(page, found.as_dict(), Outputs(json, report), setup, found.start.traffic.lost, [other_said(found)])
    if found.declined:
        raise typer.Exit(NO_ANSWER)
