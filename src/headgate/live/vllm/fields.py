"""Settings of headgate inside vLLM, each declared once; `headgate serve` derives its flags from them."""

from __future__ import annotations

import logging
from functools import cached_property
from math import inf
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from headgate.settings_base import Delay, Seconds, Setting, SettingsModel, Switch, declared, parameters

LOG = logging.getLogger("vllm.headgate")  # a child of vLLM's logger: its handlers, format and level hold

AUTO = "auto"  # `keep`: without promises it is `eb+`, without a card it learns step times
OBSERVE = "vllm"  # the name of no policy: vLLM decides, we only watch

MayBe = Literal["class", "ttft", "tbt", "guess"]  # parameters of a request, without their prefix headgate_
CLIENTS_MAY: tuple[MayBe, ...] = get_args(MayBe)

PANEL = "headgate"  # in --help
BETWEEN = ("itl", "tpot")  # other names of the promise of every gap; the second until 0.3, with a warning
DEFAULT = "auto (default): keep, which without promises is eb+"
MOST_DELIVERY = 0.2  # of a promise between tokens
SHORTEST_CLAIM = 0.05  # seconds between tokens, where the operator promises none
Status = Literal[503, 429]
NAMED = "NAME, NAME:PARAMETER=VALUE,... or FILE.py:CLASS"
Name = Annotated[str, Field(strict=True, min_length=1)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]


class Promise(SettingsModel):
    """What one class of requests was promised."""

    ttft: Seconds | None = None  # time to first token
    tbt: Seconds | None = declared(PANEL, "time between tokens", also=BETWEEN)


class Floor(SettingsModel):
    """The shortest times a request may claim for itself; promises of classes are not cut."""

    ttft: Seconds = 0.1
    tbt: Seconds | None = declared(PANEL, "time between tokens", also=BETWEEN)  # None: see `shortest_claim`


class Settings(SettingsModel):
    """Everything one may set, in a file, in `--additional-config` or as flags of `headgate serve`."""

    policy: str = declared(PANEL, f"{NAMED}; {DEFAULT}; vllm: let vLLM decide and only watch", AUTO)
    set: dict[str, Setting] = parameters(PANEL, "a parameter of the policy, NAME=VALUE", "refill=48")
    card: str | None = declared(
        PANEL, "cost card, for policies that price steps: a name or a file (default: auto learns them)"
    )
    ttft: Seconds | None = declared(
        PANEL, "promised time to first token, such as 500ms, unless a request has its own"
    )
    tbt: Seconds | None = declared(
        PANEL, "promised time between two tokens, such as 100ms, likewise", also=BETWEEN
    )
    delivery: Delay = declared(
        PANEL, "of each promise between tokens, kept for the way from engine to client (default: 10ms)", 0.01
    )
    refuse: Status | None = declared(
        PANEL, "503 or 429: answer to requests that cannot be in time (default: serve them last)"
    )
    trace: Name | None = declared(PANEL, "write a step trace here, for `headgate trace`")
    watchdog: Seconds = declared(
        PANEL, "disable the policy when a request gets nothing for so long (default: 5min)", 300.0
    )
    metrics: Switch = declared(PANEL, "Prometheus metrics headgate_* (default: on)", True)
    metrics_port: Port | None = declared(PANEL, "serve them on a port of their own, too")
    log_every: Seconds = declared(PANEL, "time between two lines about steps in the log (default: 60s)", 60.0)
    force: Switch = declared(PANEL, "try a vLLM outside 0.26 to 0.32", False)
    any_card: Switch = declared(PANEL, "take a card of another model, too", False)
    classes: dict[str, Promise] = Field(default_factory=dict)
    clients_may: tuple[MayBe, ...] = ("class",)  # parameters that requests may set themselves
    floor: Floor = Floor()

    def within(self, promise: float | None) -> float | None:
        """The gap that the engine must keep so that clients see the promised one.

        On an H200 behind vLLM's own HTTP server no gap in the engine was longer than 97 ms, and clients saw
        some of 108 ms. At most a fifth of a promise goes to delivery.
        """
        return None if promise is None else promise - min(self.delivery, MOST_DELIVERY * promise)

    @cached_property
    def shortest_claim(self) -> float:
        """The shortest gap that a request may claim: the floor, or what the operator promises anyway.

        The shortest gap among those that decode limits the steps of all. Found once: classes may be many.
        """
        promised = (self.tbt, *(each.tbt for each in self.classes.values()))
        return self.floor.tbt or min((each for each in promised if each), default=SHORTEST_CLAIM)

    def tightest(self) -> float:
        """The shortest gap that the engine must keep for anybody; infinite where none is promised."""
        promised = (self.tbt, *(each.tbt for each in self.classes.values()))
        return min((self.within(each) or inf for each in promised), default=inf)

    def priorities_said(self) -> str | None:
        """What `--scheduling-policy priority` means beside promises of a first token; None where all it says
        holds.
        """
        promised = (self.ttft, *(each.ttft for each in self.classes.values()))
        if self.named()[0] != "keep" or not (any(promised) or "ttft" in self.clients_may):
            return None
        return (
            "--scheduling-policy priority: keep puts promises of a first token before priorities, which order"
            " late requests and those without such a promise; where priorities must come first, use --policy"
            " slai:order=priority or drop the promises"
        )

    def learns(self) -> bool:
        """Whether step times are learned while serving, for want of a card."""
        return self.card is None and self.named()[0] == "keep"

    def named(self) -> tuple[str, dict[str, Any]]:
        """The policy's name and its parameters as they were written, in `policy` and in `set`."""
        from headgate.methods.make import split_name  # all policies; the command line does without them

        name, inline = split_name(self.policy)
        name = "keep" if name == AUTO else name
        own = {"refuse": "predicted"} if self.refuse and name == "keep" else {}
        return name, {**own, **self.set, **inline}
