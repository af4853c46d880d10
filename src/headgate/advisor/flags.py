"""What to set in plain vLLM or SGLang, without a plug-in: by formula; `check_flags` simulates the advice."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, sqrt
from shlex import quote
from statistics import NormalDist
from typing import Any, NamedTuple

from headgate.advisor.capacity.search import Progress
from headgate.advisor.capacity.traffic import Level, promised_gap
from headgate.advisor.situation import SATURATED, Situation, card_situation
from headgate.advisor.threshold import MISS, WHOLE, ThresholdPlan, plan_threshold
from headgate.core.errors import InputError, RunError
from headgate.cost.card import DERIVED_CARD, Card, hub_name
from headgate.cost.derive.derived_card import AUTO, BF16, GRAPH, UTILISATION, WantedCard, parse
from headgate.cost.model import Shape, StepCost
from headgate.experiment.build import DEFAULT_BUDGET, DEFAULT_REQUESTS, DEFAULT_SLOTS, refuse_speculation
from headgate.experiment.run import Prepared, carry_out
from headgate.experiment.settings import Experiment
from headgate.methods.eb.prediction import exclusive_rate, mixed_rate
from headgate.methods.eb.thresholds import Threshold
from headgate.methods.keep.learned import confined
from headgate.sim.engine.engine import Engine
from headgate.stats.metrics import Metrics, summarise


class EngineFlags(NamedTuple):
    title: str
    serve: str
    slots: str
    budget: str
    policy: str  # what it does without a plug-in
    own: tuple[int, int]  # slots and budget on GPUs of 70 GiB and more (vLLM: no A100)
    experts: str
    length: str


ENGINES = {
    "vllm": EngineFlags(
        title="vLLM",
        serve="vllm serve",
        slots="--max-num-seqs",
        budget="--max-num-batched-tokens",
        policy="mixed",
        own=(1024, 8192),
        experts="--enable-expert-parallel",
        length="--max-model-len",
    ),
    "sglang": EngineFlags(
        title="SGLang",
        serve="sglang serve",
        slots="--max-running-requests",
        budget="--chunked-prefill-size",
        policy="sglang",
        own=(2048, 8192),
        experts="--expert-parallel-size {}",
        length="--context-length",
    ),
}
LARGE_GPU = ENGINES["vllm"].own
QUEUE_SINCE = "0.29"  # the oldest vLLM release we saw --max-num-queued-tokens in (its pull request 49445)


class Flag(NamedTuple):
    name: str
    value: Any  # a number; True: the flag takes none
    why: str

    @property
    def text(self) -> str:
        return self.name if self.value is True else f"{self.name} {self.value}"


@dataclass(frozen=True)
class FlagsPlan:
    """The answer of `headgate plan flags`. Rates are those of a saturated engine with these flags."""

    situation: Situation
    card: Card
    settings: Experiment
    slots: Flag
    budget: Flag
    queue: Flag | None  # without a TTFT target there is none
    waiting: int | None  # about so many mean prompts in that queue
    decoding: int  # requests that decode at once when saturated; the other slots hold prompts under way
    rate: float
    per_token: float
    more: tuple[Flag, ...] = ()  # of SGLang
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the policy that these flags make

    @property
    def served_by(self) -> EngineFlags:
        return ENGINES[self.settings.engine]

    @property
    def flags(self) -> tuple[Flag, ...]:
        return tuple(flag for flag in (self.slots, self.budget, self.queue) if flag) + self.more

    def overloaded(self) -> str:
        offered = self.situation.load.rate
        if offered is None or offered <= self.rate:
            return ""
        return (
            f"Overloaded: {offered:,.4g} requests/s are offered, one engine with these flags serves "
            f"{self.rate:,.4g}, so the backlog grows by {offered - self.rate:,.3g} requests/s. Add engines "
            "(headgate plan capacity --find engines) or lower the rate."
        )

    def as_dict(self) -> dict[str, Any]:
        lengths = self.situation.lengths
        return {
            "costs_from": self.situation.source,
            "workload": self.situation.workload,
            "model": self.card.model,
            "gpu": self.card.gpu,
            "targets": {"tpot": self.settings.tpot, "ttft": self.settings.ttft},
            "lengths": {**lengths.as_dict(), "output_tokens": lengths.output + 1},
            "flags": {flag.name: {"value": flag.value, "why": flag.why} for flag in self.flags},
            "queued_requests": self.waiting,
            "decoding": self.decoding,
            **({"queue_flag_since": QUEUE_SINCE} if self.settings.engine == "vllm" else {"engine": "sglang"}),
            "saturated": {"rate": self.rate, "per_token": self.per_token},
            "notes": list(self.situation.notes),
        }


class Checked(NamedTuple):
    label: str
    slots: int
    budget: int
    metrics: Metrics

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "metrics": self.metrics.as_dict()}


def plan_flags(settings: Experiment, gap: float | None = None) -> FlagsPlan:
    """Slots from memory and the TPOT target, the budget from that target, the queue from the TTFT target.

    A promised `gap` decides SGLang's pieces; vLLM's budget for one is searched by `headgate advise`.
    """
    refuse_speculation(settings, "plan flags")
    about, card = card_situation(settings)
    more, parameters = list[Flag](), dict[str, Any]()
    if settings.engine == "sglang":
        (slots, budget, rate, per_token), more, parameters = _sglang(settings, about, gap)
        decoding = max(1, min(slots.value, round(rate * about.lengths.output * per_token)))
    else:
        slots, budget, rate, per_token = _mixed(about, settings.tpot, ENGINES["vllm"])
        decoding = floor(sustained(about, slots.value, budget.value))
    queue, waiting = None, None
    if settings.ttft is not None:
        queue, waiting = _queue(about, rate, per_token, settings.ttft)
        if settings.engine == "sglang":
            queue = Flag("--max-queued-requests", waiting, queue.why)
    found = slots, budget, queue, waiting, decoding, rate, per_token, tuple(more), parameters
    return FlagsPlan(about, card, settings, *found)


Limits = tuple[Flag, Flag, float, float]  # slots, budget, the rate and the mean time between tokens with them


def _mixed(about: Situation, tpot: float | None, names: EngineFlags) -> Limits:
    slots = _slots(about, tpot, names.slots)
    budget = _budget(about, slots.value, tpot, names.budget)
    rate = mixed_rate(about.cost, about.lengths, slots.value, budget.value)
    return slots, budget, rate, step_mean(about, slots.value, budget.value)


def sustained(about: Situation, running: float, budget: int) -> float:
    """How many of `running` requests decode at once: prompts must enter as fast, within the same budget."""
    return max(1.0, min(running, budget / (1 + about.lengths.computed / about.lengths.output)))


def step_mean(about: Situation, running: float, budget: int) -> float:
    """The mean step of mixed batching, which is its TPOT: running / (output * rate)."""
    decodes = sustained(about, running, budget)
    return decodes / about.lengths.output / mixed_rate(about.cost, about.lengths, running, budget)


def safe_mixed_slots(about: Situation) -> int:
    """Slots whose KV, at its mean plus as many deviations as one moment in a hundred asks for, fits.

    Mixed batching refills slot by slot, so requests of all ages run at any moment; their KV is taken from
    the workload itself, prompts and outputs together. Solves N * mean + z * deviation * sqrt(N) = capacity.
    """
    mean, spread = about.held.mean + about.block / 2, about.held.spread
    margin = NormalDist().inv_cdf(1 - MISS) * spread
    root = (sqrt(margin**2 + 4 * mean * about.kv_tokens) - margin) / (2 * mean)
    return max(1, floor(root**2))


def _slots(about: Situation, tpot: float | None, name: str = ENGINES["vllm"].slots) -> Flag:
    by_memory = safe_mixed_slots(about)
    most = min(by_memory, about.slots)
    why = f"KV memory is enough for {by_memory:,} such requests 99 % of the time"
    if by_memory > about.slots:
        why += f"; {about.slots:,} is the most the card or --slots allows"
    if tpot is None:
        return Flag(name, most, why + ". No --tpot was given.")
    for slots in range(most, 0, -1):
        if (mean := step_mean(about, slots, about.budget)) <= tpot:
            limit = f"a mean mixed step with {slots:,} requests takes {_ms(mean)}, --tpot allows {_ms(tpot)}"
            return Flag(name, slots, f"{why}; {limit}.")
    least = step_mean(about, 1, about.budget)
    raise InputError(f"--tpot {_ms(tpot)}: one request alone needs {_ms(least)} per token; ask for more")


def _budget(about: Situation, slots: int, tpot: float | None, name: str = ENGINES["vllm"].budget) -> Flag:
    needed = slots * (1 + about.lengths.computed / about.lengths.output)
    steady = f"in a steady state a step holds {needed:,.0f} tokens"
    if tpot is None:
        usual = max(slots, min(DEFAULT_BUDGET, about.budget))
        return Flag(name, usual, f"No --tpot was given, so nothing asks for less; {steady}.")
    beside = most_tokens(about.budget - slots, lambda chunk: _step(about, slots, chunk) <= tpot)
    value = max(slots, (slots + beside) // MULTIPLE * MULTIPLE)
    step = f"a step of {slots:,} decodes and {value - slots:,} prompt tokens"
    why = f"{step} takes {_ms(_step(about, slots, value - slots))}; {steady}"
    if value < needed:
        why += f", more than this: {floor(sustained(about, slots, value)):,} of the slots decode at once"
    return Flag(name, value, why + ".")


def _queue(about: Situation, rate: float, per_token: float, ttft: float) -> tuple[Flag, int]:
    """Prompt tokens that may wait so that the next prompt still has its first token in time.

    vLLM turns a request away when the prompts before it already reach the limit, whatever its own length;
    so limit and one mean prompt must be served in the target, less the step that brings the token.
    """
    drain = rate * about.lengths.prompt
    limit = floor((ttft - per_token) * drain - about.lengths.prompt)
    if limit < 1:
        least = per_token + about.lengths.prompt / drain
        raise InputError(
            f"--ttft {_ms(ttft)}: at full load a mean prompt alone takes {_ms(least)}; ask for more, or for "
            "a longer --tpot"
        )
    waiting = max(1, round(limit / about.lengths.prompt))
    why = f"a full engine computes {drain:,.0f} prompt tokens/s; so many waiting and one prompt more take"
    return Flag("--max-num-queued-tokens", limit, f"{why} the {_ms(ttft)} of --ttft, on average."), waiting


def _step(about: Situation, decodes: int, chunk: int) -> float:
    return about.cost.seconds(Shape(decodes, round(decodes * about.lengths.context), chunk))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def loaded_with(card: Card, longest: int, engine: str = "vllm") -> list[str]:
    said = card.provenance.settings or {}
    derived = _asked(card.name)
    quantization, kv = said.get("quantization", "None"), said.get("KV data type", BF16)
    names, share = ENGINES[engine], derived.utilisation
    words = {
        f"--tensor-parallel-size {card.tensor_parallel}": card.tensor_parallel > 1,
        f"--pipeline-parallel-size {derived.pipeline}": derived.pipeline > 1,
        names.experts.format(derived.expert): derived.expert > 1,
        f"--quantization {quote(quantization)}": quantization != "None",
        f"--kv-cache-dtype {quote(kv)}": kv not in (AUTO, BF16),
        f"{MEMORY} {share:g}": share != UTILISATION and engine == "vllm",
        f"{names.length} {longest}": True,
    }
    return [word for word, holds in words.items() if holds]


def model_of(card: Card, named: str) -> str | None:
    asked = _asked(named)
    return hub_name("" if asked.from_file else asked.model) or hub_name(card.model)


def _asked(name: str) -> WantedCard:
    try:
        return parse(name) if name.startswith(DERIVED_CARD) else WantedCard("", "")
    except InputError:  # a card in a file may be called anything
        return WantedCard("", "")


# -- SGLang's flags

RATIO = 0.7  # of what requests may still produce: what SGLang keeps free at first
RESERVED = 4096  # output tokens that a request counts at most, and where it names no max_tokens
OWN_GRAPHS = 256  # requests in its largest decode graph on an H100 or H200; less on smaller GPUs
NO_PLUG_IN = "no flags make it; it takes the plug-in, headgate serve MODEL --engine sglang"


def _sglang(
    settings: Experiment, about: Situation, gap: float | None
) -> tuple[Limits, list[Flag], dict[str, Any]]:
    """Mixed chunks where they serve more; else exclusive batches with EB's threshold, which is a flag.

    A promised gap is kept by small pieces with a decode step between two of them.
    """
    names = ENGINES["sglang"]
    planned = plan_threshold(replace(about, load=SATURATED))
    if planned.winner == "mixed":
        slots, budget, rate, per_token = _mixed(about, settings.tpot or gap, names)
        why = f"mixed steps serve {-100 * planned.gain:.0f} % more than exclusive ones, by the card."
        more, parameters = [Flag("--enable-mixed-chunk", True, why)], {"mixed_chunk": True}
    else:
        refill = _exclusive_slots(about, planned, settings.tpot)
        refill, budget, rate, per_token = _pieces(about, refill, gap)
        slots = Flag(names.slots, refill.slots, _why_slots(about, refill.slots, settings.tpot, gap))
        more, parameters = _exclusive_flags(about, refill, budget.value, gap)
    more += _beside(about, slots.value, parameters)
    return (slots, budget, rate, per_token), more, parameters


def _exclusive_slots(about: Situation, planned: ThresholdPlan, tpot: float | None) -> Threshold:
    chosen = planned.thresholds.chosen
    if tpot is None or planned.exclusive.per_token <= tpot:
        return chosen

    def at(slots: int) -> ThresholdPlan:
        return plan_threshold(replace(about, load=SATURATED, slots=slots))

    most = most_tokens(chosen.slots, lambda slots: at(slots).exclusive.per_token <= tpot)
    if not most:
        least = at(1).exclusive.per_token
        raise InputError(f"--tpot {_ms(tpot)}: one request alone needs {_ms(least)} per token; ask for more")
    return at(most).thresholds.chosen


def _why_slots(about: Situation, slots: int, tpot: float | None, gap: float | None) -> str:
    if gap is not None:
        return f"so many serve the most under gaps of {_ms(gap)}, within what KV memory is enough for."
    if slots == about.slots:
        return f"{slots:,} is the most the card or --slots allows; KV memory is enough for them."
    kept = "" if tpot is None else f", and --tpot {_ms(tpot)} is kept"
    return f"KV memory is enough for so many such requests in 99 % of the refills{kept}."


def _pieces(about: Situation, refill: Threshold, gap: float | None) -> tuple[Threshold, Flag, float, float]:
    """Prompt tokens of a step, with the rate and the mean time between tokens that follow.

    Under a gap fewer slots may serve more: their decode step leaves more of it to prompts.
    """
    name, lengths = ENGINES["sglang"].budget, about.lengths
    if gap is None:
        share = min(refill.refill / refill.slots, WHOLE)
        rate = exclusive_rate(about.cost, lengths, refill.slots, share, about.budget)
        why = "No gap is promised (--slo tbt=...), so nothing asks for less."
        usual = Flag(name, min(DEFAULT_BUDGET, about.budget), why)
        return refill, usual, rate, (refill.slots - refill.refill / 2) / lengths.output / rate
    best = (0.0, 0, 0, 0.0)  # rate, slots, tokens, time between tokens
    for slots in range(refill.slots, 0, -max(1, refill.slots // 64)):
        tokens = _piece(about, slots, gap)
        if tokens:
            decodes = max(1, min(slots, round(lengths.output * tokens / lengths.computed)))
            prompts = lengths.computed / tokens * about.cost.seconds(Shape(0, 0, tokens))
            rate = 1 / (prompts + lengths.output / decodes * _step(about, decodes, 0))
            best = max(best, (rate, slots, tokens, decodes / lengths.output / rate))
    rate, slots, tokens, per_token = best
    if not slots:
        alone = _step(about, 1, 0)
        raise InputError(
            f"--slo tbt={_ms(gap)}: one decode step takes {_ms(alone)}, which leaves no {MULTIPLE} prompt "
            "tokens beside it; ask for more"
        )
    prompt, decode = about.cost.seconds(Shape(0, 0, tokens)), _step(about, slots, 0)
    why = (
        f"a step of so many takes {_ms(prompt)}, a decode step of all slots {_ms(decode)}: together the gap."
    )
    kept = refill._replace(slots=slots, refill=max(1, round(refill.share * slots)))
    return kept, Flag(name, tokens, why), rate, per_token


def _piece(about: Situation, slots: int, gap: float) -> int:
    left = gap - _step(about, slots, 0)
    fitting = most_tokens(about.budget, lambda chunk: about.cost.seconds(Shape(0, 0, chunk)) <= left)
    return fitting // MULTIPLE * MULTIPLE


def _exclusive_flags(
    about: Situation, refill: Threshold, budget: int, gap: float | None
) -> tuple[list[Flag], dict[str, Any]]:
    flags, parameters, free = [], {}, refill.refill
    if gap is not None:
        why = f"a decode step after each piece of a prompt, so that no gap is longer than {_ms(gap)}."
        flags.append(Flag("--prefill-decode-interval", 1, why))
        parameters["prefill_decode_interval"] = 1
        free = min(free, ceil(budget / about.lengths.computed))
    if free > 1:
        why = "EB's threshold: prompts wait until so many slots are free, then enter together"
        why += "." if gap is None else "; so many fill a step."
        flags.append(Flag("--min-free-slots-delay", free, why))
        parameters["min_free_slots_delay"] = free
    return flags, parameters


def _beside(about: Situation, slots: int, parameters: dict[str, Any]) -> list[Flag]:
    flags = []
    free = about.kv_tokens / slots - about.held.mean - about.block / 2
    reserved = min(RESERVED, about.lost.longest)
    share = floor(100 * free / (RATIO * reserved)) / 100
    if share < 1:
        share = max(share, 0.05)
        why = (
            f"requests that name no max_tokens count {reserved:,} output tokens, and the mean is "
            f"{about.lengths.output + 1:,.0f}: with 1.0 SGLang would let fewer than {slots:,} in at first."
        )
        flags.append(Flag("--schedule-conservativeness", share, why))
        parameters["conservativeness"] = share
    if slots > OWN_GRAPHS:
        why = f"larger decodes run without a CUDA graph; SGLang's own is {OWN_GRAPHS} on an H100 or H200."
        flags.append(Flag("--cuda-graph-max-bs-decode", slots, why))
    return flags


def sglang_words(policy: str, parameters: Mapping[str, Any], slots: int, budget: int) -> list[str]:
    names = ENGINES["sglang"]
    own: dict[str, Any] = {"slots": slots, "budget": budget}
    if policy == "mixed":
        parameters = {"mixed_chunk": True}
    elif policy == "eb" and not parameters.get("max_gap"):
        parameters = {"min_free_slots_delay": parameters["refill"]}
    elif policy == "v0":
        parameters = {}
    elif policy != names.policy:
        return []
    written = {
        "max_prefill_tokens": "--max-prefill-tokens",
        "min_free_slots_delay": "--min-free-slots-delay",
        "prefill_decode_interval": "--prefill-decode-interval",
        "interval_min_bs": "--prefill-decode-interval-min-bs",
        "conservativeness": "--schedule-conservativeness",
        "order": "--schedule-policy",
    }
    own |= parameters
    words = [f"{names.slots} {own['slots']}", f"{names.budget} {own['budget']}"]
    words += [f"{flag} {parameters[key]}" for key, flag in written.items() if key in parameters]
    return words + (["--enable-mixed-chunk"] if parameters.get("mixed_chunk") else [])


# -- the advice, tried out


ADVISED = "advised"


def check_flags(settings: Experiment, plan: FlagsPlan, progress: Progress) -> tuple[list[Checked], str]:
    """Mixed batching simulated with the advice and with defaults, on the same requests; and under what load.

    Without the queue limit: no request is turned away.
    """
    settings, load = _loaded(settings, plan)
    served_by = plan.served_by
    tried = {(plan.slots.value, plan.budget.value): ADVISED}
    if settings.engine == "vllm":
        tried[DEFAULT_SLOTS, DEFAULT_BUDGET] = "headgate's"
    tried.setdefault(served_by.own, f"{served_by.title}'s")
    checks = []
    for (slots, budget), label in tried.items():
        limits = {"slots": min(slots, plan.situation.slots), "budget": min(budget, plan.situation.budget)}
        prepared = Prepared(settings.model_copy(update=limits))
        with progress(label, len(prepared.workload)) as report:
            parameters = dict(plan.parameters) if label == ADVISED else {}
            run = carry_out(prepared, served_by.policy, parameters, progress=report)
        if run.meta["outcome"] != "finished":
            raise RunError(f"--check, {label}: the run was {run.meta['outcome']}")
        checks.append(Checked(label, limits["slots"], limits["budget"], summarise(run)))
    return checks, load


def _loaded(settings: Experiment, plan: FlagsPlan) -> tuple[Experiment, str]:
    load = plan.situation.load
    if load.rate is not None:
        return settings, f"{load.rate:.3g} requests/s"
    if load.clients is not None:
        return settings, f"{load.clients:,} clients"
    if settings.trace or settings.stages or settings.arrivals:
        return settings, "all at once"
    clients = plan.decoding + plan.waiting if plan.waiting else plan.slots.value
    requests = settings.requests or max(DEFAULT_REQUESTS, 10 * clients)
    loaded = settings.model_copy(update={"clients": clients, "requests": requests})
    return loaded, f"{clients:,} clients, as many as the flags let in"


# -- a budget for a promised gap

FILLED = 0.97  # of the promised gap: what a full step may take
MULTIPLE = 256  # budgets are rounded down to this


def gap_budget(
    cost: StepCost, prompt: float, output: float, rate: float, gap: float, slots: int, most: int
) -> int:
    """`max_num_batched_tokens` for which a full step takes the promised gap: d decodes and x prompt tokens.

    Every step is as long as the promise when prompts queue, so d = rate x output x gap requests decode, and
    read d x (prompt + output / 2) tokens. Fewer tokens waste capacity, more break the promise.
    """
    decodes = max(1, min(slots, round(rate * output * gap)))
    context = round(decodes * (prompt + output / 2))

    def fits(chunk: int) -> bool:
        return cost.seconds(Shape(decodes, context, chunk)) <= FILLED * gap

    return max(MULTIPLE, (most_tokens(most - decodes, fits) + decodes) // MULTIPLE * MULTIPLE)


def most_tokens(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits; 0 where none does."""
    most = max(most, 0)
    return most - bisect_left(range(most, 0, -1), True, key=fits)


# -- CUDA graphs for a promised gap

FLAG = "--max-cudagraph-capture-size"
MEMORY, WITH_GRAPHS = "--gpu-memory-utilization", 0.90  # vLLM sets nothing aside for graphs
LARGEST, GRAPH_MULTIPLE = 4096, 16  # the largest size measured; vLLM captures every 16 tokens
WHY = (
    "steps with prompts then run from CUDA graphs; vLLM's own limit is 512 tokens. On an H200 a launch "
    "beyond it took the host 40 ms, from a graph 15 ms or less, and single launches of 100 ms made gaps "
    "late. Graphs up to 4,096 tokens took 27 s more at the start and 1.6 GiB."
)


def graph_flags(budget: int, largest: int | None = None) -> dict[str, str]:
    """For steps of up to `budget` tokens; `largest` is what was simulated. Larger ones need more memory."""
    size = min(-(-budget // GRAPH_MULTIPLE) * GRAPH_MULTIPLE, largest or LARGEST)
    return {FLAG: str(size), **({MEMORY: f"{WITH_GRAPHS:.2f}"} if size > GRAPH else {})}


def with_graphs(settings: Experiment, levels: Sequence[Level]) -> Experiment:
    """Simulated with the graphs that are advised where a gap is promised, unless the user names others."""
    if settings.engine != "vllm" or settings.graph or promised_gap(levels) is None:
        return settings
    return settings.model_copy(update={"graph": LARGEST})


def graphs_said(settings: Experiment, engine: Engine, levels: Sequence[Level]) -> list[str]:
    if not settings.graph or promised_gap(levels) is None or engine.cost.host is None:
        return []
    return [f"steps run from CUDA graphs of up to {settings.graph:,} tokens (vLLM: {FLAG}; here: --graph)"]


def small_graphs(engine: Engine, levels: Sequence[Level], policies: Iterable[str]) -> list[str]:
    gap = promised_gap(levels)
    why = confined(engine.cost, gap) if gap is not None and "keep" in policies else None
    return [f"{why} (here: --graph)"] if why else []
