"""Everything that decides a run: what a TOML file may say, and the same as flags."""

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
    Seconds,
    Setting,
    Switch,
    Tokens,
    Whole,
    Words,
    checked,
)


class Lengths(Words):
    """Prompt and output lengths: a law with means, both laws apart, or a file."""

    workload: str = "uniform"  # fixed, uniform, geometric, gamma, lognormal, lengths=FILE
    prompt_law: str | None = None  # instead of `workload`, for prompts alone
    output_law: str | None = None
    prompt: Tokens | None = None  # mean tokens
    output: Tokens | None = None
    shape: Positive | None = None  # of gamma
    sigma: Positive | None = None  # of lognormal
    spread: Positive | None = None  # of uniform


class ClassWords(Lengths):
    """One class of a mix."""

    name: str
    share: Positive
    ttft: Seconds | None = None  # promises
    tpot: Seconds | None = None
    priority: Whole = 0
    patience: Seconds | None = None


class StageWords(Words):
    """One stretch of a load that changes."""

    requests: Count
    rate: Positive | None = None
    clients: Count | None = None
    prompt: Tokens | None = None
    output: Tokens | None = None


class ManyEngines(Words):
    """A fleet: its engines, its router, what it costs to hand KV over, what tokens bring."""

    engines: FleetSize | None = None  # None: one engine and no router
    router: str | None = None  # NAME or NAME:PARAMETER=VALUE,...
    set_router: dict[str, Setting] = Field(default_factory=dict)
    routers: Annotated[tuple[str, ...], NotEmpty] = ()  # for compare
    transfer_delay: Delay | None = None
    kv_bytes: Positive | None = None  # of one token
    bandwidth: Positive | None = None  # GB/s
    prompt_price: NotNegative | None = None
    output_price: NotNegative | None = None


class Experiment(Lengths, ManyEngines):
    """Everything that decides a run. See `headgate simulate --help` for each word."""

    policy: str = "mixed"
    set: dict[str, Setting] = Field(default_factory=dict)
    policies: Annotated[tuple[str, ...], NotEmpty] = ()  # for compare
    card: str = "h200-qwen3-8b"
    trace: str | None = None
    format: str | None = None
    slice: str | None = None
    scale_rate: Positive | None = None
    skip_bad_rows: Switch = False
    sort: Switch = False
    cap_prompt: Count | None = None
    cap_output: Count | None = None
    clients: Count | None = None
    rate: Positive | None = None
    arrivals: str | None = None
    burstiness: Positive | None = None
    all_at_once: Switch = False
    requests: Count | None = None
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    slots: Count | None = None
    budget: Count | None = None
    kv_tokens: Count | None = None
    block: Count | None = None
    model_len: Count | None = None
    asynchronous: Switch = False  # the engine composes a step while the one before it runs
    ttft: Seconds | None = None
    tpot: Seconds | None = None
    patience: Seconds | None = None
    abort: Seconds | None = None
    watchdog: Seconds = 3600.0
    classes: Annotated[tuple[ClassWords, ...], NotEmpty] = ()
    stages: Annotated[tuple[StageWords, ...], NotEmpty] = ()


def experiment(words: dict[str, Any], where: str = "") -> Experiment:
    """Checked words; `where` says in messages which file they are from."""
    return checked(Experiment, words, _fields, where)


def _fields(parent: tuple[int | str, ...]) -> list[str]:
    """The words one may use at this place."""
    nested: dict[str, type[Words]] = {"classes": ClassWords, "stages": StageWords}
    here = nested.get(str(parent[0]), Experiment) if parent else Experiment
    return list(here.model_fields)
