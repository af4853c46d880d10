"""The words of a run: what a TOML file may say, and the same words as flags."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headgate.core.errors import InputError, first_fault
from headgate.workloads.durations import duration

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Tokens = Annotated[float, Field(ge=1)]


def _seconds(value: object) -> object:
    return duration(value) if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]


class Words(BaseModel):
    """Unknown words are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
    priority: int = 0
    patience: Seconds | None = None


class StageWords(Words):
    """One stretch of a load that changes."""

    requests: Count
    rate: Positive | None = None
    clients: Count | None = None
    prompt: Tokens | None = None
    output: Tokens | None = None


class Experiment(Lengths):
    """Everything that decides a run. See `headgate simulate --help` for each word."""

    policy: str = "mixed"
    set: dict[str, int | float | str | bool] = {}
    policies: tuple[str, ...] = ()  # for compare
    card: str = "h200-qwen3-8b"
    trace: str | None = None
    format: str | None = None
    slice: str | None = None
    scale_rate: Positive | None = None
    skip_bad_rows: bool = False
    sort: bool = False
    cap_prompt: Count | None = None
    cap_output: Count | None = None
    clients: Count | None = None
    rate: Positive | None = None
    arrivals: str | None = None
    burstiness: Positive | None = None
    all_at_once: bool = False
    requests: Count | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    slots: Count | None = None
    budget: Count | None = None
    kv_tokens: Count | None = None
    block: Count | None = None
    model_len: Count | None = None
    ttft: Seconds | None = None
    tpot: Seconds | None = None
    patience: Seconds | None = None
    abort: Seconds | None = None
    watchdog: Seconds = 3600.0
    classes: tuple[ClassWords, ...] = ()
    stages: tuple[StageWords, ...] = ()


def read_words(path: str | Path) -> dict[str, Any]:
    """The words in a TOML file, not yet checked. Dashes in names may be underscores."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"experiment file {path}: {error.strerror or error}; give a readable file") from None
    except UnicodeDecodeError:
        raise InputError(f"experiment file {path}: not UTF-8 text; an experiment is a TOML file") from None
    try:
        return {name.replace("-", "_"): value for name, value in tomllib.loads(text).items()}
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"experiment file {path}: not valid TOML: {error}; mend the file") from None


def experiment(words: dict[str, Any], where: str = "") -> Experiment:
    """Checked words; `where` says in messages which file they are from."""
    try:
        return Experiment.model_validate(words)
    except InputError as error:  # from a duration
        raise InputError(f"{where}{error}") from None
    except ValidationError as error:
        raise InputError(where + first_fault(error.errors(include_url=False), _fields)) from None


def _fields(parent: tuple[int | str, ...]) -> list[str]:
    """The words one may use at this place."""
    nested: dict[str, type[Words]] = {"classes": ClassWords, "stages": StageWords}
    here = nested.get(str(parent[0]), Experiment) if parent else Experiment
    return list(here.model_fields)
