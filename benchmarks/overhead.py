"""What headgate costs inside vLLM: `python -m benchmarks.overhead [--policies ...] [--decodes ...]`.

A real vLLM scheduler (asynchronous: step n+1 is composed before the tokens of step n are known) serves a busy
engine whose model takes no time. In the same run, step by step, CPU time of the thread inside vLLM's own
schedule() and update_from_output() is told from that of ours around and within them. The clock that policies
see is virtual, so every repetition has the same steps; of each step the quickest repetition counts. What
the meter reads in a run of vLLM's own scheduler, without headgate, is the meter's own time: it is subtracted,
and is the first row.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.busy_scheduler import KINDS, Busy, Load, Meter, Step
from studies.h200.models import TINY

POLICIES = ("mixed", "eb", "eb-online", "eb+", "slai", "keep:ttft=2,tbt=0.1")
MICRO = 1e-3  # of nanoseconds
BARE = "no headgate"


def measured(slots: int, policy: str, steps: int, tries: int, folder: Path, load: Load) -> list[Step]:
    """The steps of a busy engine under a policy; of each the quickest of some tries."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from headgate.live.vllm.plugin import Headgate

    runs = []
    for _ in range(tries):
        meter = Meter()
        with meter.watching(Scheduler, Headgate):  # from the start: headgate remembers vLLM's functions
            busy = Busy(slots, folder, load, meter, policy == BARE)
            busy.fill()
            busy.follow(policy)
            busy.step()  # its tokens are of a step composed before
            runs.append([step for step in (busy.step() for _ in range(steps)) if step])
        live = getattr(busy.scheduler, "_headgate", None)
        assert live is None or live.fallen is None, live.fallen
    best = []
    for same in zip(*runs, strict=True):
        assert len({(step.kind, step.running) for step in same}) == 1, "two runs had different steps"
        ours, theirs = min(step.ours for step in same), min(step.theirs for step in same)
        best.append(same[0]._replace(ours=ours, theirs=theirs))
    return best


def one_line(policy: str, steps: list[Step], meter: float) -> Iterator[dict[str, Any]]:
    """For each kind of step, and for all: microseconds, less those of the `meter`, and the ratio."""
    for kind in (*KINDS, "all"):
        chosen = [step for step in steps if kind in (step.kind, "all")]
        if chosen:
            ours, theirs = (sum(getattr(step, name) for step in chosen) for name in ("ours", "theirs"))
            ours -= meter / MICRO * len(chosen)
            yield {
                "policy": policy,
                "steps": kind,
                "count": len(chosen),
                "ours": ours / len(chosen) * MICRO,
                "vllm": theirs / len(chosen) * MICRO,
                "ratio": ours / theirs,
                "each": ours / sum(step.running for step in chosen) * MICRO,
            }


def arm(policy: str, slots: int) -> str:
    """EB refills a sixteenth of the slots."""
    return f"eb:refill={slots // 16}" if policy == "eb" else policy


def profiled(slots: int, policy: str, steps: int, folder: Path, load: Load) -> None:
    """Which functions of ours take the time."""
    busy = Busy(slots, folder, load, Meter())
    busy.fill()
    busy.follow(policy)
    with cProfile.Profile() as profile:
        for _ in range(steps):
            busy.step()
    pstats.Stats(profile).sort_stats("tottime").print_stats("headgate", 25)


def main(argv: list[str]) -> None:
    """Measure, print a table, and with --json write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--decodes", nargs="+", type=int, default=[64, 256, 1024, 2048])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=Load().prompt, help="tokens of each prompt")
    parser.add_argument("--shared", type=int, default=0, help="of those, the first that all have in common")
    parser.add_argument("--waiting", type=int, help="requests that wait (default: a quarter of the slots)")
    parser.add_argument("--card", default=Load().card, help="cal-h200-qwen3-8b has a host, too")
    parser.add_argument("--profile", action="store_true", help="which functions take the time")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    load = Load(asked.prompt, asked.shared, asked.waiting, asked.card)
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = TINY.write(Path(place))
        print("| decodes | policy | steps | number | vLLM, us | headgate, us | share | us per request |")
        print("|---|---|---|---|---|---|---|---|")
        for slots in asked.decodes:
            meter = 0.0
            for policy in (BARE, *(arm(each, slots) for each in asked.policies)):
                if asked.profile:
                    if policy != BARE:
                        profiled(slots, policy, asked.steps, folder, load)
                    continue
                steps = measured(slots, policy, asked.steps, asked.tries, folder, load)
                for line in one_line(policy, steps, meter):
                    found.append({"decodes": slots, **line})
                    print(
                        f"| {slots} | `{policy}` | {line['steps']} | {line['count']} | {line['vllm']:,.0f} "
                        f"| {line['ours']:,.1f} | {line['ratio']:.2%} | {line['each']:.3f} |",
                        flush=True,
                    )
                if policy == BARE:
                    meter = line["ours"]
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
