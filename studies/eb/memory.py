"""How often EB's slots overflow memory, by the bound that chose them, against the promised one per cent."""

from __future__ import annotations

from math import log1p
from typing import NamedTuple

import numpy as np

from headgate.core.policy import Observer, Steps
from headgate.core.request import Request
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.methods.eb.thresholds import safe_slots, settle
from headgate.sim.engine.engine import Engine
from headgate.workloads.lengths import Geometric, Uniform
from headgate.workloads.synthetic import generate
from headgate_papers.eb.theory import paper_slots
from studies.eb.worlds import Row, Settings, everywhere, rate, serve, show

MISS = 0.01
DECODE, BLOCK = 0.01, 1
BUDGET = 10**6  # a refill is one prefill step, as in the model of the bounds


class Case(NamedTuple):
    """One of seven engines: geometric outputs, costs that ask for `share`."""

    prompt: int
    output: int
    share: float
    capacity: int
    simulated: tuple[float, float]  # by an independent simulation, for (6) and N_safe, in %
    number: int = 20_000  # requests; more where a cycle refills many


CASES = (
    Case(512, 256, 0.176, 400_000, (34, 0.6)),
    Case(128, 1024, 0.1, 400_000, (3, 3.4)),
    Case(128, 1024, 0.3, 400_000, (4, 0)),
    Case(128, 1024, 0.7, 400_000, (77, 1.3), 60_000),
    Case(1024, 128, 0.3, 400_000, (45, 0.8)),
    Case(105, 280, 0.5, 700_000, (32, 0), 120_000),
    Case(105, 280, 0.8, 170_000, (72, 0.7), 100_000),
)


class Cycles(Observer):
    """Decode phases: how high KV rose in each, and in which of them somebody was evicted."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.evictions: list[bool] = []
        self._prefilling = True

    def stepped(self, steps: Steps) -> None:
        """A decode step after a prefill step begins a phase; the refill's own end counts with it."""
        if not steps.decodes:
            self._prefilling = True
            self._kv = steps.kv
            return
        if self._prefilling:
            self.peaks.append(self._kv)
            self.evictions.append(False)
            self._prefilling = False
        self.peaks[-1] = max(self.peaks[-1], steps.kv)

    def evicted(self, request: Request, now: float) -> None:
        """Memory was short in this phase."""
        if self.evictions:
            self.evictions[-1] = True


def world(case: Case, capacity: int, slots: int) -> Engine:
    """Step costs at which the best share is the case's, and that much memory."""
    zeta = -log1p(-case.share)
    overhead = (case.share / (1 - case.share) - zeta) * (case.output - 1)  # equation (3), solved for g
    decode = DecodeTerms(DECODE, 5e-5)
    prefill = PrefillTerms(overhead * DECODE, 3e-5)
    cost = LinearCost(decode, prefill, MixedTerms(DECODE, 3e-5, 5e-5))
    return Engine(cost, capacity, 10**6, BUDGET, slots, BLOCK).checked()


def run(case: Case, capacity: int, policy: str, settings: Settings, most: int) -> Row:
    """Overflowing cycles (by peak and by eviction), cycles and throughput after warm-up."""
    workload = generate(
        case.number, seed=1, prompt=Uniform(case.prompt), output=Geometric(case.output), clients=2 * most
    )
    on = world(case, capacity, most)
    cycles = Cycles()
    found = serve(on, policy, settings, workload, (cycles,))
    keep = slice(len(cycles.peaks) // 4, -max(2, len(cycles.peaks) // 10))
    peaks, evictions = np.array(cycles.peaks[keep]), np.array(cycles.evictions[keep])
    later = slice(len(found.plans["time"]) // 4, None)
    slots, refills = found.plans["gauge.slots"][later], found.plans["gauge.refill"][later]
    return {
        "above": 100 * float(np.mean(peaks > case.capacity)),
        "evicted": 100 * float(np.mean(evictions)),
        "cycles": len(peaks),
        "rate": rate(found, case.number // 4, case.number - 2 * most),
        "N": float(np.median(slots)),
        "share": float(np.median(refills / slots)),
        "preemptions": int(found.requests["evictions"].sum()),
    }


def known(case: Case) -> Row:
    """The law is known: slots of both bounds, unlimited memory, cycles whose peak is above the capacity."""
    ending, spread = 1 / (case.output - 1), case.prompt / 12**0.5
    paper = paper_slots(case.share, ending, case.prompt, case.capacity, MISS)
    safe = safe_slots(case.share, ending, case.prompt, spread, case.capacity, miss=MISS)
    row = _row(case)
    for name, slots, before in (("(6)", paper, case.simulated[0]), ("N_safe", safe, case.simulated[1])):
        settings: Settings = {"slots": slots, "refill": settle(case.share, slots).refill}
        found = run(case, 10**8, "eb", settings, slots)
        row |= {f"N {name}": slots, f"overflow {name} %": found["above"], f"reference {name} %": before}
        row |= {f"cycles {name}": found["cycles"]}
    return row


def learned(case: Case) -> Row:
    """The law is learned by online EB in a memory of that size: cycles with an eviction, and throughput."""
    most = 2 * case.capacity // (case.prompt + case.output)
    row = _row(case)
    ways: dict[str, tuple[str, Settings]] = {
        "(6)": ("eb-paper", {"gate": "fit"}),
        "N_safe": ("eb-online", {"slot_rule": "planned", "gate": "fit"}),
        "N_safe, gate": ("eb-online", {"slot_rule": "planned"}),
        "forecast": ("eb-online", {}),
    }
    for name, (policy, settings) in ways.items():
        found = run(case, case.capacity, policy, settings, most)
        row |= {f"N {name}": found["N"], f"share {name}": found["share"]}
        row |= {
            f"overflow {name} %": found["evicted"],
            f"rate {name}": found["rate"],
            f"preemptions {name}": found["preemptions"],
        }
    return row


def _row(case: Case) -> Row:
    return {"lengths": f"{case.prompt}/{case.output}", "share": case.share, "KV tokens": case.capacity}


def main(quick: bool) -> None:
    """Study 3."""
    cases = CASES[:3] if quick else CASES
    rows = everywhere(known, cases)
    columns = {"lengths": "", "share": "", "KV tokens": "d"}
    each = {"N {}": ".0f", "overflow {} %": ".1f", "reference {} %": "", "cycles {}": "d"}
    both = {key.format(name): how for name in ("(6)", "N_safe") for key, how in each.items()}
    show(
        "Known law: share of cycles whose peak exceeds memory",
        rows,
        columns | both,
        "" if quick else "memory_known",
    )
    rows = everywhere(learned, [case._replace(number=case.number // 2) for case in cases])
    each = {"N {}": ".0f", "overflow {} %": ".1f", "rate {}": ".2f"}
    names = ("(6)", "N_safe", "N_safe, gate", "forecast")
    all_ways = {key.format(name): how for name in names for key, how in each.items()}
    show(
        "Learned law: share of cycles with an eviction",
        rows,
        columns | all_ways,
        "" if quick else "memory_learned",
    )
