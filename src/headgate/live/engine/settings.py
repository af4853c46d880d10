"""Settings of headgate inside an engine, of which `headgate serve` derives its flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from math import inf
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from headgate.core.errors import InputError
from headgate.core.files import read_json, read_text
from headgate.core.request import GAP, Slo
from headgate.settings_base import (
    ALSO_GAPS,
    BETWEEN,
    Delay,
    Seconds,
    Setting,
    SettingsModel,
    Switch,
    Weight,
    check_promises,
    check_worth,
    checked,
    declared,
    parameters,
    parse_toml,
    promised,
    underscored,
)

WARM_UP = "headgate-warm-up"  # the class of requests that warm a server up; any client may name it
FILE = "HEADGATE_CONFIG"  # the environment variable that names a file of settings
KEY = "headgate"  # our key in the engine's own settings
AUTO = "auto"  # `keep`: without promises it is `eb+`, without a card it learns step times

MayBe = Literal[
    "class", "ttft", "tbt", "guess", "tenant"
]  # parameters of a request, without their prefix headgate_
CLIENTS_MAY: tuple[MayBe, ...] = get_args(MayBe)

PANEL = "headgate"  # in --help
DEFAULT = "auto (default): keep, which without promises is eb+; the name of the engine: only watch"
MOST_DELIVERY = 0.2  # of a promise between tokens
SHORTEST_CLAIM = 0.05  # seconds between tokens, where the operator promises none
Status = Literal[503, 429]
NAMED = "NAME, NAME:PARAMETER=VALUE,... or FILE.py:CLASS"
Name = Annotated[str, Field(strict=True, min_length=1)]
Mark = Annotated[str, Field(strict=True, min_length=1, max_length=200)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]


class Promise(SettingsModel):
    ttft: Seconds | None = None  # time to first token
    tbt: Seconds | None = declared(PANEL, "time between tokens", also=ALSO_GAPS)
    tpot: Seconds | None = None
    envelope: Seconds | None = None
    weight: Weight | None = None  # None: 1, or by the request's priority
    background: Switch = False  # promised nothing, not even what all others are; may be evicted for a promise

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        check_worth(self)
        check_promises(self)
        return self


class Floor(SettingsModel):
    """The shortest times a request may claim for itself; promises of classes are not cut."""

    ttft: Seconds = 0.1
    tbt: Seconds | None = declared(PANEL, "time between tokens", also=ALSO_GAPS)  # None: see `shortest_claim`


class Settings(SettingsModel):
    """Everything one may set, in a file, in a flag of the engine's own or as flags of `headgate serve`."""

    policy: str = declared(PANEL, f"{NAMED}; {DEFAULT}", AUTO)
    set: dict[str, Setting] = parameters(PANEL, "a parameter of the policy, NAME=VALUE", "refill=48")
    card: str | None = declared(
        PANEL, "cost card, for policies that price steps: a name or a file (default: auto learns them)"
    )
    ttft: Seconds | None = declared(
        PANEL, "promised time to first token, such as 500ms, unless a request has its own"
    )
    tbt: Seconds | None = declared(
        PANEL, "promised time between any two tokens, such as 100ms, likewise", also=ALSO_GAPS
    )
    tpot: Seconds | None = declared(PANEL, "instead: promised mean time between the tokens of a request")
    envelope: Seconds | None = declared(
        PANEL, "instead: token j is promised at arrival + ttft + j times this"
    )
    delivery: Delay = declared(
        PANEL, "of each promise between tokens, kept for the way from engine to client (default: 20ms)", 0.02
    )
    refuse: Status | None = declared(
        PANEL, "503 or 429: answer to requests that cannot be in time (default: serve them last)"
    )
    trace: Name | None = declared(PANEL, "write a step trace here, for `headgate trace`")
    mark: Mark | None = None  # the trace says when the file with this word was read; `headgate trial` sets it
    watchdog: Seconds = declared(
        PANEL, "disable the policy when a request gets nothing for so long (default: 5min)", 300.0
    )
    metrics: Switch = declared(PANEL, "Prometheus metrics headgate_* (default: on)", True)
    metrics_port: Port | None = declared(PANEL, "serve them on a port of their own, too")
    log_every: Seconds = declared(PANEL, "time between two lines about steps in the log (default: 60s)", 60.0)
    force: Switch = declared(PANEL, "try a release of the engine that headgate does not know", False)
    any_card: Switch = declared(PANEL, "take a card of another model, too", False)
    lockstep: Switch = declared(
        PANEL, "promise gaps although data-parallel ranks of a model with experts step together", False
    )
    classes: dict[str, Promise] = Field(default_factory=dict)
    clients_may: tuple[MayBe, ...] = ("class",)  # parameters that requests may set themselves
    floor: Floor = Floor()

    @field_validator("classes")
    @classmethod
    def _own_classes(cls, classes: dict[str, Promise]) -> dict[str, Promise]:
        if WARM_UP in classes:
            raise ValueError(f"{WARM_UP} is the class of requests that warm a server up; take another name")
        return classes

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        check_promises(self)
        return self

    def promise(self, own: Promise, first: float | None = None, gap: float | None = None) -> Slo:
        slo = promised(own, weight=own.weight)
        if gap is not None:
            slo = slo._replace(between_tokens=gap, between_kind=GAP)
        elif slo.between_tokens is None:
            slo = slo._replace(between_tokens=self._slo.between_tokens, between_kind=self._slo.between_kind)
        first = first or slo.first_token or self.ttft
        if slo.between_kind == GAP:
            return slo._replace(first_token=first, between_tokens=self.within(slo.between_tokens))
        return slo._replace(first_token=first)

    @cached_property
    def _slo(self) -> Slo:
        return promised(self)

    @cached_property
    def common(self) -> Slo:
        return self.promise(NO_PROMISE)

    def within(self, promise: float | None) -> float | None:
        """The gap that the engine must keep so that clients see the promised one.

        On an H200 behind an HTTP server with 300 streams the longest gap of a request was up to 20 ms longer
        at its client than in the engine (p99 12 to 20 ms). At most a fifth of a promise goes to delivery.
        """
        return None if promise is None else promise - min(self.delivery, MOST_DELIVERY * promise)

    @cached_property
    def shortest_claim(self) -> float:
        """The floor, or the shortest gap that is promised anyway: it limits the steps of all."""
        limits = (promised(words).between_tokens for words in (self, *self.classes.values()))
        return self.floor.tbt or min((limit for limit in limits if limit), default=SHORTEST_CLAIM)

    def tightest(self) -> float:
        """Means and envelopes included, which policies keep gap by gap; infinite where none is promised."""
        promises = (self.common, *(self.promise(own) for own in self.classes.values()))
        return min((slo.between_tokens or inf for slo in promises), default=inf)

    def gaps_promised(self) -> str | None:
        for name, own in (("", self), *self.classes.items()):
            for word in BETWEEN:
                if getattr(own, word):
                    return f"{word} of class {name}" if name else word
        if "tbt" in self.clients_may:
            return 'clients_may = ["tbt"]'
        name, words = self.named()
        return f"tbt of policy {name}" if words.get("tbt") is not None else None

    def priorities_said(self, flag: str) -> str | None:
        """What the flag that orders requests by priority means beside promises of a first token; None where
        all it says holds. Then any client's priority is its weight, unless its class has one.
        """
        promised = (self.ttft, *(promise.ttft for promise in self.classes.values()))
        if self.named()[0] != "keep" or not (any(promised) or "ttft" in self.clients_may):
            return None
        return (
            f"{flag}: keep puts promises of a first token before priorities. A priority is a weight, ten"
            " times more for each step, unless its class has one: it decides which promise is broken where"
            " not all can be kept; where priorities must come first, use --policy slai:order=priority or drop"
            " the promises"
        )

    def learns(self) -> bool:
        return self.card is None and self.named()[0] == "keep"

    def named(self) -> tuple[str, dict[str, Any]]:
        from headgate.methods.make import split_name  # all policies; the command line does without them

        name, inline = split_name(self.policy)
        name = "keep" if name == AUTO else name
        own = {"refuse": "predicted"} if self.refuse and name == "keep" else {}
        return name, {**own, **self.set, **inline}


NO_PROMISE = Promise()


def file_of() -> str | None:
    return os.environ.get(FILE) or None


def where_is(file: str | None) -> str:
    return f"settings file {file}: " if file else ""


def read_settings(file: str | None = None, over: object = None, flag: str = "") -> Settings:
    """What the engine's own flag says of us, if there is one, over what the file says, over the defaults."""
    file = file or file_of()
    words = check_words(read_file(file), where_is(file)) if file else {}
    return merge(words, over, flag)


def merge(words: dict[str, Any], over: object, flag: str) -> Settings:
    """A policy brings its own parameters: where `over` names a policy, the `set` of `words` is dropped."""
    merged = dict(words)
    if over is not None:
        if not isinstance(over, dict):
            raise InputError(f'{flag}: {KEY} must be a table, such as {{"policy": "mixed"}}')
        upper = check_words(over, f"{flag}, {KEY}: ")
        if "policy" in upper:
            merged.pop("set", None)
        merged = over_promises(merged, upper)
    settings = checked(Settings, merged)
    tables: list[tuple[str, Settings | Promise]] = [("", settings), *settings.classes.items()]
    for name, own in tables:
        if own.envelope and not (own.ttft or settings.ttft):  # the one may be in the file, the other a flag
            of = f"classes.{name}: " if name else ""
            raise InputError(f"{of}envelope begins where the first token is due; give ttft too")
    return settings


def over_promises(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Both, where the upper one decides; a promise for tokens replaces one of another kind."""
    dropped = BETWEEN if BETWEEN.keys() & upper.keys() else ()
    return {**{name: word for name, word in lower.items() if name not in dropped}, **upper}


def check_words(words: dict[str, Any], where: str) -> dict[str, Any]:
    words = underscored(words, where)
    checked(Settings, words, where, written=True)
    return Settings.renamed(words)


def read_file(path: str) -> dict[str, Any]:
    """The words in a JSON file, told by its name or first letter, or in a TOML file; not yet checked."""
    what = "settings file"
    if path.endswith((".yaml", ".yml")):
        raise InputError(f"{what} {path}: settings are TOML or JSON; write it as one of the two")
    text = read_text(path, what, "give a readable JSON or TOML file")
    if not (path.endswith(".json") or text.lstrip().startswith("{")):
        return parse_toml(text, path, what)
    return read_json(text, f"{what} {path}")
