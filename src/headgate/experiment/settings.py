"""Everything that decides a run. Each setting is declared here once: its name in a TOML file, its type, its
meaning and its place in `--help`; the flags are derived from it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headgate.settings_base import (
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
    checked,
    declared,
    parameters,
)

POLICY, ENGINE, LENGTHS, LOAD, TRACE, FLEET = "Policy", "Engine", "Lengths", "Load", "Trace", "Fleet"
BETWEEN = ("itl",)  # another name of the promise that every gap keeps
NAMED = "NAME, NAME:PARAMETER=VALUE,... or FILE.py:CLASS"
Seed = Annotated[int, Field(strict=True, ge=0)]


class Lengths(SettingsModel):
    """Prompt and output lengths: a law with means, both laws apart, or a file."""

    workload: str = declared(
        LENGTHS, "length law: fixed, uniform, geometric, gamma, lognormal, lengths=FILE", "uniform"
    )
    prompt: Tokens | None = declared(LENGTHS, "mean prompt tokens (default: 512)")
    output: Tokens | None = declared(LENGTHS, "mean output tokens (default: 512)")
    prompt_law: str | None = declared(LENGTHS, "another law for prompts alone")
    output_law: str | None = declared(LENGTHS, "another law for outputs alone")
    shape: Positive | None = declared(LENGTHS, "shape of gamma lengths (default: 2)")
    sigma: Positive | None = declared(LENGTHS, "sigma of lognormal lengths (default: 1)")
    spread: Positive | None = declared(
        LENGTHS, "half-width of uniform lengths, as a share of the mean (default: 0.5)"
    )
    shared_prefix: str | None = declared(
        LENGTHS, "system prompts before every prompt, TOKENS:COUNT, such as 2048:20"
    )


class ClassSettings(Lengths):
    """One class of a mix."""

    name: str
    share: Positive
    ttft: Seconds | None = None  # promises
    tbt: Seconds | None = declared(LOAD, "promised time between two tokens", flag=None, also=BETWEEN)
    tpot: Seconds | None = None
    priority: Whole = 0
    patience: Seconds | None = None


class StageSettings(SettingsModel):
    """One stretch of a load that changes."""

    requests: Count
    rate: Rate | None = None
    clients: Count | None = None
    prompt: Tokens | None = None
    output: Tokens | None = None


class ManyEngines(SettingsModel):
    """A fleet: its engines, its router, what it costs to hand KV over, what tokens bring."""

    engines: FleetSize | None = declared(
        FLEET, "so many engines behind a router (default: one, without a router)"
    )
    transfer_delay: Delay | None = declared(FLEET, "to hand KV over: before the first byte (default: 2ms)")
    kv_bytes: Positive | None = declared(
        FLEET, "to hand KV over: bytes of one token (default: 147456, Qwen3-8B)"
    )
    bandwidth: Positive | None = declared(FLEET, "to hand KV over: GB/s between two engines (default: 50)")
    send_time: Delay | None = declared(
        FLEET, "to hand KV over: the sending engine runs no step for so long (default: the card's, else 0)"
    )
    outages: str | None = declared(
        FLEET, "engines that fail or drain, ENGINE:START:END[:drain] with commas between (default: none)"
    )
    prompt_price: NotNegative | None = declared(
        FLEET, "of a prompt token, for plans and revenue (default: 1)"
    )
    output_price: NotNegative | None = declared(FLEET, "of an output token (default: 2)")
    set_router: dict[str, Setting] = parameters(
        FLEET, "a parameter of the router, NAME=VALUE; what --router says wins", "prefill=2"
    )
    router: str | None = declared(FLEET, f"{NAMED} (default: least-loaded)", flag=None)
    routers: Annotated[tuple[str, ...], NotEmpty] = declared(
        FLEET, f"{NAMED}; may be repeated", (), flag=None
    )


class Experiment(Lengths, ManyEngines):
    """Everything that decides a run, as a TOML file says it or as flags of `headgate simulate` do."""

    card: str = declared(
        ENGINE, "cost card: a built-in name (see `headgate doctor`) or a file", "cal-h200-qwen3-8b"
    )
    slots: Count | None = declared(
        ENGINE, "requests that may run at once, vLLM's max_num_seqs (default: 256)"
    )
    budget: Count | None = declared(
        ENGINE, "tokens in one step, vLLM's max_num_batched_tokens (default: 8192)"
    )
    kv_tokens: Count | None = declared(ENGINE, "KV memory in tokens (default: the card's)")
    block: Count | None = declared(ENGINE, "KV tokens per block (default: the card's)")
    model_len: Count | None = declared(
        ENGINE, "most tokens of one request, prompt and output (default: the card's)"
    )
    graph: Count | None = declared(
        ENGINE,
        "tokens of the largest CUDA graph, vLLM's max_cudagraph_capture_size (default: the card's)",
    )
    prefix_cache: Switch = declared(
        ENGINE, "find KV of shared prompts again, as vLLM does; no effect where nothing is shared", True
    )
    asynchronous: Switch | None = declared(
        ENGINE,
        "as vLLM runs: compose a step while the one before runs (default: where the card has a host)",
        flag="--asynchronous/--no-asynchronous",
    )
    turns: Annotated[float, Field(strict=True, ge=1)] | None = declared(
        LENGTHS, "mean turns of a conversation, each with all before it in its prompt (default: 1)"
    )
    think: Seconds | None = declared(LENGTHS, "mean time between two turns, such as 30s")
    cap_prompt: Count | None = declared(LENGTHS, "cut longer prompts to this")
    cap_output: Count | None = declared(LENGTHS, "cut longer outputs to this")
    clients: Count | None = declared(
        LOAD, "closed loop: so many clients, each sends when its last request returns (default: 64)"
    )
    rate: Rate | None = declared(LOAD, "open loop: requests per second")
    arrivals: str | None = declared(LOAD, "of an open loop: poisson, gamma, constant, all-at-once")
    burstiness: Positive | None = declared(LOAD, "of gamma arrivals; 1 is Poisson, smaller is burstier")
    all_at_once: Switch = declared(LOAD, "all requests are there at the start", False)
    requests: Count | None = declared(LOAD, "how many requests (default: 1000, or the whole trace)")
    seed: Seed = declared(LOAD, "one number for all randomness", 0)
    ttft: Seconds | None = declared(LOAD, "promised time to first token, such as 500ms (for goodput)")
    tbt: Seconds | None = declared(
        LOAD,
        "promised time between two tokens, such as 100ms; goodput judges every gap",
        also=BETWEEN,
    )
    tpot: Seconds | None = declared(
        LOAD, "instead: promised mean time between the tokens of a request (TPOT), such as 50ms"
    )
    patience: Seconds | None = declared(LOAD, "seconds in the queue after which a request gives up")
    abort: Seconds | None = declared(LOAD, "seconds after arrival at which every client hangs up")
    watchdog: Seconds = declared(LOAD, "stop when a request gets nothing for so long (default: 1h)", 3600.0)
    trace: str | None = declared(TRACE, "a trace file, or a bundled one: azure-conv, azure-code, sharegpt-8k")
    format: str | None = declared(
        TRACE,
        "azure, burstgpt, mooncake, qwen, vidur, vtc, servegen-offline, vllm-bench, aiperf, guidellm "
        "(default: told from the file)",
    )
    columns: str | None = declared(
        TRACE,
        "which column is which, instead of a format: arrival=ts,prompt=input,output=out,class=tenant; "
        "a CSV file headed arrival,prompt,output needs none",
    )
    times: str | None = declared(
        TRACE, "unit of the arrivals with --columns: s, ms, us, ns (default: told from the file)"
    )
    spread_ticks: Switch | None = declared(
        TRACE,
        "spread arrivals that share coarse ticks over their tick (default: for Mooncake traces)",
        None,
        flag="--spread-ticks/--no-spread-ticks",
    )
    slice: str | None = declared(TRACE, "a part of the trace, such as 10min..20min")
    scale_rate: Rate | None = declared(TRACE, "send it so many times faster")
    skip_bad_rows: Switch = declared(TRACE, "leave out bad rows and say how many", False)
    sort: Switch = declared(TRACE, "sort a trace that is out of order", False)
    set: dict[str, Setting] = parameters(
        POLICY, "a parameter of the policy, NAME=VALUE; what --policy says wins", "refill=48"
    )
    policy: str = declared(POLICY, f"{NAMED}; see headgate doctor", "mixed", flag=None)
    policies: Annotated[tuple[str, ...], NotEmpty] = declared(
        POLICY, f"{NAMED}; may be repeated", (), flag=None
    )
    classes: Annotated[tuple[ClassSettings, ...], NotEmpty] = ()
    stages: Annotated[tuple[StageSettings, ...], NotEmpty] = ()


def experiment(settings: dict[str, Any], where: str = "", written: bool = False) -> Experiment:
    """Checked settings; `where` says in messages their file, `written` that they are from one."""
    return checked(Experiment, settings, _fields, where, written)


def _fields(parent: tuple[int | str, ...]) -> list[str]:
    """The settings one may use at this place."""
    nested: dict[str, type[SettingsModel]] = {"classes": ClassSettings, "stages": StageSettings}
    here = nested.get(str(parent[0]), Experiment) if parent else Experiment
    return list(here.model_fields)
