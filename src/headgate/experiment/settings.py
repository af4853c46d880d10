"""Everything that decides a run. Each setting is declared here once: its name in a TOML file, its type, its
meaning and its place in `--help`; the flags are derived from it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from headgate.core.errors import InputError
from headgate.settings_base import (
    ALSO_GAPS,
    BETWEEN,
    Count,
    Delay,
    FleetSize,
    NotEmpty,
    NotNegative,
    Positive,
    Rate,
    Seconds,
    Setting,
    SettingsModel,
    Switch,
    Tokens,
    Whole,
    check_promises,
    check_worth,
    checked,
    declared,
    flag_of,
    parameters,
)
from headgate.workloads.lengths import FROM_FILE
from headgate.workloads.traces import BUNDLED, bundled_format

POLICY, ENGINE, LENGTHS, LOAD, TRACE, FLEET = "Policy", "Engine", "Lengths", "Load", "Trace", "Fleet"
_length, _engine, _load, _trace, _fleet = (
    partial(declared, panel) for panel in (LENGTHS, ENGINE, LOAD, TRACE, FLEET)
)
NAMED = "NAME, NAME:PARAMETER=VALUE,... or FILE.py:CLASS"
Seed = Annotated[int, Field(strict=True, ge=0)]
Accepted = Annotated[float, Field(strict=True, ge=0, le=1)]
Names = Annotated[tuple[str, ...], NotEmpty]


class LengthSettings(SettingsModel):
    """Prompt and output lengths: a law with means, both laws apart, or a file."""

    workload: str = _length(
        "length law: fixed, uniform, geometric, gamma, lognormal, lengths=FILE", "uniform"
    )
    prompt: Tokens | None = _length("mean prompt tokens (default: 512)")
    output: Tokens | None = _length("mean output tokens (default: 512)")
    prompt_law: str | None = _length("another law for prompts alone")
    output_law: str | None = _length("another law for outputs alone")
    shape: Positive | None = _length("shape of gamma lengths (default: 2)")
    sigma: Positive | None = _length("sigma of lognormal lengths (default: 1)")
    spread: Positive | None = _length("half-width of uniform lengths, as a share of the mean (default: 0.5)")
    shared_prefix: str | None = _length("system prompts before every prompt, TOKENS:COUNT, such as 2048:20")


class ClassSettings(LengthSettings):
    """One class of a mix: a share of the requests, or clients of its own in a closed loop beside them."""

    name: str
    share: Positive | None = None
    clients: Count | None = None
    ttft: Seconds | None = None  # promises
    tbt: Seconds | None = _load("promised time between two tokens", flag=None, also=ALSO_GAPS)
    tpot: Seconds | None = None
    envelope: Seconds | None = None
    weight: Annotated[float, Field(strict=True)] | None = None  # of a kept promise beside those of others
    background: Switch = False  # promised nothing, and may be evicted for a request that was
    tenant: str = ""
    priority: Whole = 0
    patience: Seconds | None = None
    accept: Accepted | None = None  # share of drafts accepted, with --speculate
    accept_spread: Positive | None = None  # a + b of the beta law that its requests draw theirs from


class StageSettings(SettingsModel):
    requests: Count
    rate: Rate | None = None
    clients: Count | None = None
    prompt: Tokens | None = None
    output: Tokens | None = None


class ManyEngines(SettingsModel):
    """A fleet: its engines, its router, what it costs to hand KV over, what tokens bring."""

    engines: FleetSize | None = _fleet("so many engines behind a router (default: one, without a router)")
    lock_step: Switch = _fleet(
        "the engines are data-parallel ranks that step together, as models with experts do", False
    )
    transfer_delay: Delay | None = _fleet("to hand KV over: before the first byte (default: 2ms)")
    kv_bytes: Positive | None = _fleet("to hand KV over: bytes of one token (default: 147456, Qwen3-8B)")
    bandwidth: Positive | None = _fleet("to hand KV over: GB/s between two engines (default: 50)")
    send_time: Delay | None = _fleet(
        "to hand KV over: the sending engine runs no step for so long (default: the card's, else 0)"
    )
    outages: str | None = _fleet(
        "engines that fail or drain, ENGINE:START:END[:drain] with commas between (default: none)"
    )
    autoscale: str | None = _fleet(
        "engines start and stop, at most --engines: plan, queue, load or fixed, with settings, such as "
        "plan:floor=2,start=90s,target=0.7 (default: all serve)",
    )
    prompt_price: NotNegative | None = _fleet("of a prompt token, for plans and revenue (default: 1)")
    output_price: NotNegative | None = _fleet("of an output token (default: 2)")
    set_router: dict[str, Setting] = parameters(
        FLEET, "a parameter of the router, NAME=VALUE; what --router says wins", "prefill=2"
    )
    router: str | None = _fleet(f"{NAMED} (default: least-loaded)", flag=None)
    routers: Names = _fleet(f"{NAMED}; may be repeated", (), flag=None)


class Experiment(LengthSettings, ManyEngines):
    """Everything that decides a run, as a TOML file says it or as flags of `headgate simulate` do."""

    card: str = _engine("cost card: a built-in name (see `headgate doctor`) or a file", "cal-h200-qwen3-8b")
    engine: Literal["vllm", "sglang"] = _engine(
        "vllm or sglang: which decodes are evicted when KV is short, and whose flags it says", "vllm"
    )
    slots: Count | None = _engine("requests that may run at once, vLLM's max_num_seqs (default: 256)")
    budget: Count | None = _engine("tokens in one step, vLLM's max_num_batched_tokens (default: 8192)")
    kv_tokens: Count | None = _engine("KV memory in tokens (default: the card's)")
    block: Count | None = _engine("KV tokens per block (default: the card's)")
    model_len: Count | None = _engine("most tokens of one request, prompt and output (default: the card's)")
    graph: Count | None = _engine(
        "tokens of the largest CUDA graph, vLLM's max_cudagraph_capture_size (default: the card's)"
    )
    speculate: str | None = _engine(
        "speculative decoding, DRAFTS:accept=SHARE,... such as 3:accept=0.7,spread=8; also draft=TIME, "
        "draft_per_decode=TIME, speculating=TIME, method=NAME (default: off; times: the card's)",
    )
    prefix_cache: Switch = _engine(
        "find KV of shared prompts again, as vLLM does; no effect where nothing is shared", True
    )
    asynchronous: Switch | None = _engine(
        "as vLLM runs: compose a step while the one before runs (default: where the card has a host)",
        flag="--asynchronous/--no-asynchronous",
    )
    turns: Annotated[float, Field(strict=True, ge=1)] | None = _length(
        "mean turns of a conversation, each with all before it in its prompt (default: 1)"
    )
    think: Seconds | None = _length("mean time between two turns, such as 30s")
    cap_prompt: Count | None = _length("cut longer prompts to this")
    cap_output: Count | None = _length("cut longer outputs to this")
    clients: Count | None = _load(
        "closed loop: so many clients, each sends when its last request returns (default: 64)"
    )
    rate: Rate | None = _load("open loop: requests per second")
    arrivals: str | None = _load("of an open loop: poisson, gamma, constant, all-at-once")
    burstiness: Positive | None = _load("of gamma arrivals; 1 is Poisson, smaller is burstier")
    requests: Count | None = _load("how many requests (default: 1000, or the whole trace)")
    seed: Seed = _load("one number for all randomness", 0)
    ttft: Seconds | None = _load("promised time to first token, such as 500ms (for goodput)")
    tbt: Seconds | None = _load(
        "promised time between two tokens, such as 100ms; goodput judges every gap", also=ALSO_GAPS
    )
    tpot: Seconds | None = _load(
        "instead: promised mean time between the tokens of a request (TPOT), such as 50ms"
    )
    envelope: Seconds | None = _load(
        "instead: token j is promised at arrival + --ttft + j times this, such as 50ms"
    )
    patience: Seconds | None = _load("seconds in the queue after which a request gives up")
    abort: Seconds | None = _load("seconds after arrival at which every client hangs up")
    watchdog: Seconds = _load("stop when a request gets nothing for so long (default: 1h)", 3600.0)
    trace: str | None = _trace("a trace file, or a bundled one: azure-conv, azure-code, sharegpt-8k")
    format: str | None = _trace(
        "azure, burstgpt, mooncake, qwen, vidur, vtc, servegen-offline, vllm-bench, aiperf, guidellm "
        "(default: told from the file)",
    )
    columns: str | None = _trace(
        "which column is which, instead of a format: arrival=ts,prompt=input,output=out, and class=kind, "
        "tenant=team, session=chat where there are; usual names (created_at, prompt_tokens) need none",
    )
    times: str | None = _trace(
        "unit of the arrivals with --columns: s, ms, us, ns (default: told from the file)"
    )
    spread_ticks: Switch | None = _trace(
        "spread arrivals that share coarse ticks over their tick (default: for Mooncake traces)",
        flag="--spread-ticks/--no-spread-ticks",
    )
    slice: str | None = _trace("a part of the trace, such as 10min..20min")
    scale_rate: Rate | None = _trace("send it so many times faster")
    skip_bad_rows: Switch = _trace("leave out bad rows and say how many", False)
    set: dict[str, Setting] = parameters(
        POLICY, "a parameter of the policy, NAME=VALUE; what --policy says wins", "refill=48"
    )
    policy: str = declared(POLICY, f"{NAMED}; see headgate doctor", "mixed", flag=None)
    policies: Names = declared(POLICY, f"{NAMED}; may be repeated", (), flag=None)
    classes: Annotated[tuple[ClassSettings, ...], NotEmpty] = ()
    stages: Annotated[tuple[StageSettings, ...], NotEmpty] = ()


def experiment(settings: dict[str, Any], where: str = "", written: bool = False) -> Experiment:
    return checked(Experiment, settings, where, written)


# -- settings that exclude one another

MAKE_LENGTHS = ("prompt", "output", "workload", "prompt_law", "output_law", "shape", "sigma", "spread")
MAKE_SESSIONS = ("shared_prefix", "turns", "think")
ABOUT_TRACES = ("format", "columns", "times", "spread_ticks", "slice", "scale_rate", "skip_bad_rows")
HAND_OVER = ("transfer_delay", "kv_bytes", "bandwidth", "send_time")
ABOUT_FLEETS = ("router", "routers", "set_router", "outages", "autoscale", *HAND_OVER)
LOADS = ("clients", "rate")
AT_ONCE = "all-at-once"
OWN = {"shape": "gamma", "sigma": "lognormal", "spread": "uniform"}  # a parameter belongs to one length law


def refuse_conflicts(words: Experiment) -> None:
    """Every word must have an effect."""
    if words.trace is None:
        _refuse(words, ABOUT_TRACES, "is about traces; give --trace FILE or drop it")
        _refuse_idle_lengths(words, "")
    else:
        _check_trace(words, words.trace)
    _refuse_both(words, "")
    if words.classes:
        _check_classes(words)
    if words.engines is None:
        _refuse(words, (*ABOUT_FLEETS, "lock_step"), "is about fleets; give --engines or drop it")
    if words.autoscale:
        _refuse(words, ("outages",), "is about a fleet of one size, not --autoscale; drop one")
    if words.lock_step:
        _refuse(words, ABOUT_FLEETS, "is about engines behind a router, not --lock-step ranks; drop one")
    _check_load(words)
    if words.think and not words.turns:
        raise InputError("--think is the time between turns; give --turns or drop it")
    if words.stages:
        _check_stages(words)


def without_clients(words: Experiment) -> Experiment:
    shares = tuple(share for share in words.classes if not share.clients)
    return words.model_copy(update={"classes": shares}) if len(shares) < len(words.classes) else words


def flag(word: str) -> str:
    return f"[[{word}]]" if word in ("classes", "stages") else flag_of(word)


def at_once(words: Experiment) -> bool:
    return words.arrivals == AT_ONCE


def _given(words: LengthSettings, word: str) -> bool:
    return word in words.model_fields_set and getattr(words, word) not in (None, False, ())


def _refuse(words: LengthSettings, names: tuple[str, ...], why: str) -> None:
    for word in names:
        if _given(words, word):
            raise InputError(f"{flag(word)} {why}")


def _check_trace(words: Experiment, trace: str) -> None:
    classes = [] if all(share.clients for share in words.classes) else ["classes"]
    lengths = (*MAKE_LENGTHS, *MAKE_SESSIONS, *classes, "stages")
    _refuse(words, lengths, "makes lengths, but --trace brings its own; drop one of the two")
    if words.scale_rate and (words.clients or words.rate or at_once(words)):
        raise InputError("--scale-rate changes the trace's own times, another load replaces them; choose one")
    if words.columns and words.format:
        raise InputError(f"--format {words.format} and --columns both say what the columns are; drop one")
    if trace in BUNDLED and (words.columns or words.times):
        raise InputError(f"--columns and --times are about files, {trace} is a bundled trace; drop them")
    if trace in BUNDLED and words.format not in (None, own := bundled_format(trace)):
        raise InputError(f"--format {words.format}, but {trace} is a bundled trace in {own}'s; drop --format")


def _refuse_idle_lengths(words: LengthSettings, where: str) -> None:
    laws = {words.prompt_law or words.workload, words.output_law or words.workload}
    for parameter, law in OWN.items():
        if _given(words, parameter) and law not in laws:
            raise InputError(
                f"{where}{flag(parameter)} belongs to {law} lengths; drop it or choose --workload {law}"
            )
    if words.prompt_law and words.output_law and _given(words, "workload"):
        raise InputError(f"{where}--workload is replaced by --prompt-law and --output-law; drop it")
    if any(law == FROM_FILE for law in laws):
        raise InputError(f"{where}lengths= names no file; write lengths=FILE")


def _refuse_missing_lengths(share: ClassSettings) -> None:
    for which in ("prompt", "output"):
        law = getattr(share, f"{which}_law") or share.workload
        if getattr(share, which) is None and not law.startswith(FROM_FILE):
            raise InputError(f"classes.{share.name}: no {which}; give its mean, such as {which} = 200")


def _refuse_both(words: Experiment | ClassSettings, where: str) -> None:
    try:
        check_promises(words, "--")
    except ValueError as error:
        raise InputError(f"{where}{error}") from None
    if words.envelope and not words.ttft:
        raise InputError(f"{where}--envelope begins where the first token is due; give --ttft too")


def _check_classes(words: Experiment) -> None:
    if words.trace is None:
        lengths = (*MAKE_LENGTHS, "shared_prefix", "ttft", *BETWEEN)
        _refuse(words, lengths, "does not reach the classes of a mix; say it in each [[classes]] table")
    for number, share in enumerate(words.classes):
        _refuse_idle_lengths(share, f"classes.{number}: ")
        _refuse_both(share, f"classes.{number}: ")
        if (share.share is None) == (share.clients is None):
            said = "neither share nor clients" if share.share is None else "share and clients"
            raise InputError(
                f"classes.{share.name}: {said}; give one: a share of the rate, or its own clients"
            )
        try:
            check_worth(share)
        except ValueError as error:
            raise InputError(f"classes.{share.name}: {error}") from None
        _refuse_missing_lengths(share)
        if share.patience and words.patience:
            raise InputError(f"--patience, but class {share.name!r} has its own; say it in one place")
        if share.accept_spread and share.accept is None:
            raise InputError(f"classes.{number}: accept_spread is about accept; give accept or drop it")
        if share.accept is not None and words.speculate is None:
            raise InputError(f"classes.{number}: accept is about drafts; give --speculate or drop it")
    if any(share.clients for share in words.classes):
        _check_beside(words)


def _check_beside(words: Experiment) -> None:
    name = next(share.name for share in words.classes if share.clients)
    if not words.trace and all(share.clients for share in words.classes):
        raise InputError(
            f"classes.{name}: clients, and no class comes at a rate; give each a share and the mix --clients"
        )
    if words.clients or at_once(words) or not (words.rate or words.trace):
        raise InputError(
            f"classes.{name}: clients send beside classes that come at a rate; give --rate for those"
        )
    senders = [(share.name, share.tenant) for share in words.classes if share.clients]
    for name, tenant in senders:
        if any(share.name == name and not share.clients for share in words.classes):
            raise InputError(
                f"classes.{name}: share and clients in two tables of one name; give the clients another name"
            )
        if senders.count((name, tenant)) > 1:
            raise InputError(f"classes.{name}: clients in two tables of one tenant; add them up in one")
    _refuse(words, ("stages", "turns"), f"does not go with clients of a class ({name}); drop one of the two")


def _check_load(words: Experiment) -> None:
    given = [word for word in LOADS if getattr(words, word)] + ["arrivals"] * at_once(words)
    if len(given) > 1:
        raise InputError(f"{flag(given[0])} and {flag(given[1])} are two kinds of load; choose one")
    timed = [word for word in ("arrivals", "burstiness") if getattr(words, word)]
    if at_once(words):
        if words.burstiness:
            raise InputError("--burstiness, but all requests are there at the start; drop one of the two")
    elif timed and words.rate is None and not (words.stages and all(stage.rate for stage in words.stages)):
        raise InputError(f"{flag(timed[0])} needs --rate; give requests per second")


def _check_stages(words: Experiment) -> None:
    for word in ("rate", "clients", "prompt", "output"):
        own = [getattr(stage, word) is not None for stage in words.stages]
        if all(own) and _given(words, word):
            raise InputError(f"{flag(word)} is replaced by every stage's own; drop it")
        if word in ("rate", "clients") and any(own):
            if at_once(words) or _given(words, "clients" if word == "rate" else "rate"):
                raise InputError(f"a stage has its own {word}, but the load is of another kind; choose one")
            if not all(own) and not _given(words, word):
                missing = own.index(False)
                raise InputError(f"stage {missing} has no {word}, others have; add it or give {flag(word)}")
    if any(stage.rate for stage in words.stages) and any(stage.clients for stage in words.stages):
        raise InputError("stages with a rate and stages with clients in one load; run them one by one")
