"""The words one may set for headgate inside vLLM."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import Field

from headgate.methods.make import split_name
from headgate.settings_base import Seconds, Setting, Switch, Words

LOG = logging.getLogger("vllm.headgate")  # a child of vLLM's logger: its handlers, format and level hold

OBSERVE = "vllm"  # the name of no policy: vLLM decides, we only watch

CLIENTS_MAY = ("class", "ttft", "tbt", "guess")  # parameters of a request, without their prefix headgate_
MayBe = Literal["class", "ttft", "tbt", "guess"]

Port = Annotated[int, Field(strict=True, ge=1, le=65535)]


class Promise(Words):
    """What one class of requests was promised."""

    ttft: Seconds | None = None  # time to first token
    tbt: Seconds | None = None  # time between tokens


class Floor(Words):
    """The shortest times a request may claim for itself; promises of classes are not cut."""

    ttft: Seconds = 0.1
    tbt: Seconds = 0.02


class Settings(Words):
    """Everything one may set. `headgate serve --help` says what each word means."""

    policy: str = "eb+"
    set: dict[str, Setting] = Field(default_factory=dict)
    card: str | None = None
    watchdog: Seconds = 300.0
    trace: Annotated[str, Field(strict=True, min_length=1)] | None = None
    metrics: Switch = True
    metrics_port: Port | None = None
    classes: dict[str, Promise] = Field(default_factory=dict)
    clients_may: tuple[MayBe, ...] = ("class",)  # parameters that requests may set themselves
    floor: Floor = Floor()
    force: Switch = False
    any_card: Switch = False  # take a card of another model, too
    log_every: Seconds = 60.0

    def named(self) -> tuple[str, dict[str, Any]]:
        """The policy's name and its parameters as they were written, in `policy` and in `set`."""
        name, inline = split_name(self.policy)
        return name, {**self.set, **inline}
