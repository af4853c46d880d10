"""Requests that no engine of this size can serve: counted, named with the remedy, left out of promises."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headgate.experiment.build import too_long
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload


class Unservable(NamedTuple):
    """How many of how many requests do not fit, and the prompt from which on none does."""

    number: int = 0
    total: int = 0
    longest: int = 0

    @property
    def said(self) -> str:
        """One sentence with the remedy, "" where all fit."""
        if not self.number:
            return ""
        return (
            f"Cannot be served: {self.number:,} of {self.total:,} requests "
            f"({100 * self.number / self.total:.3g} %) have prompts of {self.longest:,} tokens or more, "
            "which is all that model length or KV allow. They are left out of every figure but their count; "
            "raise --model-len (vLLM: --max-model-len) or cut prompts with --cap-prompt."
        )

    def before(self, document: dict[str, Any]) -> dict[str, Any]:
        """A document for JSON with the same as its first entry, where there is something to say."""
        if not self.number:
            return document
        lost = {"requests": self.number, "of": self.total, "prompt_tokens_from": self.longest}
        return {"cannot_be_served": {**lost, "said": self.said}, **document}


ALL_FIT = Unservable()


def unservable(workload: Workload, engine: Engine) -> Unservable:
    """Those that do not fit; an error where none does."""
    return Unservable(too_long(workload, engine), len(workload), engine.longest)


def servable(workload: Workload, engine: Engine) -> Workload:
    """The requests that fit; an error where there are none."""
    return (
        workload.subset(np.asarray(workload.prompt < engine.longest))
        if too_long(workload, engine)
        else workload
    )
