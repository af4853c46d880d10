"""The words one may set for headgate inside vLLM."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import Field

from headgate.methods.make import split_name
from headgate.settings_base import Seconds, Setting, Switch, Words

LOG = logging.getLogger("vllm.headgate")  # a child of vLLM's logger: its handlers, format and level hold

AUTO = "auto"  # keep: with promises it keeps them, without any it is eb+; without a card it learns prices
OBSERVE = "vllm"  # the name of no policy: vLLM decides, we only watch

Port = Annotated[int, Field(strict=True, ge=1, le=65535)]


class Promise(Words):
    """What one class of requests was promised."""

    ttft: Seconds | None = None  # time to first token
    tbt: Seconds | None = None  # time between tokens


class Settings(Words):
    """Everything one may set. `headgate serve --help` says what each word means."""

    policy: str = AUTO
    ttft: Seconds | None = None  # promised to requests that bring no promise of their own
    tbt: Seconds | None = None
    refuse: Literal[503, 429] | None = (
        None  # answer to requests that cannot be in time; None: serve them last
    )
    set: dict[str, Setting] = Field(default_factory=dict)
    card: str | None = None
    watchdog: Seconds = 300.0
    trace: Annotated[str, Field(strict=True, min_length=1)] | None = None
    metrics: Switch = True
    metrics_port: Port | None = None
    classes: dict[str, Promise] = Field(default_factory=dict)
    force: Switch = False
    any_card: Switch = False  # take a card of another model, too
    log_every: Seconds = 60.0

    def learns(self) -> bool:
        """Whether step times are learned while serving, for want of a card."""
        return self.card is None and self.named()[0] == "keep"

    def named(self) -> tuple[str, dict[str, Any]]:
        """The policy's name and its parameters as they were written, in `policy` and in `set`."""
        name, inline = split_name(self.policy)
        name = "keep" if name == AUTO else name
        own = {"refuse": "predicted"} if self.refuse and name == "keep" else {}
        return name, {**own, **self.set, **inline}
