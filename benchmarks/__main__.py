"""Race the simulator: `make bench`, or `python -m benchmarks NAME...` for some of the races.

Prints figures and keeps them in benchmarks/latest-pure.json or latest-compiled.json, race by race; at the end
a table of both builds for README.md. Times are CPU seconds of one core, the best of three; on a shared
machine compare ratios of one run, not seconds of two.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import worlds
from benchmarks.many_engines import many_engines
from benchmarks.plain import PlainEngine
from headgate.core.build import compiled
from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import Plan
from headgate.core.policy import BatchPolicy
from headgate.core.request import Slo
from headgate.core.view import Limits, View
from headgate.cost.card import load_card
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.keep.policy import Keep
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.mixed.sarathi import ShortestFirst
from headgate.methods.rad import Rad
from headgate.methods.slai import Slai
from headgate.methods.wait.wait import NestedWait, Wait
from headgate.record.recorder import Recorder
from headgate.sim.engine.engine import Engine, engine_of_card
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Workload, private

Result = dict[str, float]
HERE = Path(__file__).parent
QUEUES = (250, 4000, 16_000, 40_000)  # requests that wait, for (l)


GOALS = """\
(b) 5,000 conversations, s | 0.20 pure, 0.06 compiled | azure | seconds
(c) one million conversations, s | 15 compiled | million | azure: CPU seconds
(c) one million conversations, GiB | 1 | million | azure: GiB at most
(c) one million requests, saturated EB, s | | million | saturated: CPU seconds
(e) cost per request, batch 16 to 1,024, times | 2 | flatness | batch: largest over smallest
(e) cost per request, prompts 64 to 4,096, times | 2 | flatness | prompt: largest over smallest
(f) a saturated EB run of 4,000 requests, s | | leases | seconds
(h) 64,000 requests on 256 engines, round robin, s | 4 | engines | 256, round-robin: CPU seconds
(h) the same, prefill and decode split, s | 6 | engines | 256, split: CPU seconds
(h) cost per request at 256 engines over 1, times | 1.25 | engines | largest over smallest
(h) 250,000 requests on 1,000 engines, s | | thousand | CPU seconds
(h) 250,000 requests on 1,000 engines, GiB | | thousand | GiB at most
(i) asynchronous over synchronous, times | 1.5 | asynchronous | times
(l) a plan of keep with 16,000 late over 250 waiting, times | 2 | queued | keep, late: 16,000 over 250
(l) the same without a promise, times | 2 | queued | keep, no promise: 16,000 over 250
(l) the same of all kinds and 100 tenants, times | 2 | queued | keep, mixed: 16,000 over 250
(l) the same in a burst, times | | queued | keep, burst: 16,000 over 250
(k) plan capacity --policy all, 3,000 requests, CPU s of two cores | 120 | capacity | CPU seconds"""


def fast(engine: Engine, policy: Callable[[], BatchPolicy], workload: Workload, tries: int = 3) -> float:
    """CPU seconds of a whole run with its record, the best of some tries."""
    best = float("inf")
    for _ in range(tries):
        began = time.process_time()
        recorder = Recorder()
        Simulator(engine, policy(), workload, (recorder,)).run()
        recorder.tables()
        best = min(best, time.process_time() - began)
    return best


def plain_race() -> Result:
    """(a) Against the same engine that touches every running request at every step, 256 running."""
    engine, workload = worlds.engine(256), worlds.saturated(512, 256)
    found: Result = {}
    if compiled():
        return found  # the compiled check of plans reads a ledger only
    policies: dict[str, Callable[[], BatchPolicy]] = {
        "mixed": lambda: Mixed(256, 16384),
        "eb(32)": lambda: Exclusive(256, 32),
    }
    for name, policy in policies.items():
        began = time.process_time()
        PlainEngine(engine, policy(), workload, (Recorder(),)).run()
        plain = time.process_time() - began
        ours = fast(engine, policy, workload)
        found[f"{name}: requests per second, plain"] = len(workload) / plain
        found[f"{name}: requests per second, ours"] = len(workload) / ours
        found[f"{name}: times faster"] = plain / ours
    return found


def azure() -> Result:
    """(b) 5,000 conversations at 6.45/s, mixed batching, paged KV."""
    workload = worlds.conversations(5000)
    seconds = fast(worlds.engine(), lambda: Mixed(512, 16384), workload, tries=5)
    return {"seconds": seconds, "requests per second": 5000 / seconds}


def million() -> Result:
    """(c) One million requests in a process of their own: seconds, with workload and tables, and memory."""
    found: Result = {}
    for name in ("azure", "saturated"):
        command = [sys.executable, "-m", "benchmarks", f"--million={name}"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        for key, value in json.loads(answer.stdout).items():
            found[f"{name}: {key}"] = value
    return found


def one_million(name: str) -> Result:
    """What a process of its own does for `million`."""
    began = time.process_time()
    policy: BatchPolicy
    if name == "azure":
        workload, policy = worlds.conversations(1_000_000), Mixed(512, 16384)
    else:
        workload, policy = worlds.saturated(1_000_000, 1024, 128, 128), Exclusive(512, 32)
    recorder = Recorder()
    Simulator(worlds.engine(), policy, workload, (recorder,)).run()
    recorder.tables()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"CPU seconds": time.process_time() - began, "GiB at most": peak}


def command_line() -> Result:
    """(d) 1,000 requests through the command line, imports and all."""
    import tempfile

    best = float("inf")
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            command = [str(Path(sys.executable).parent / "headgate"), "simulate", "--requests", "1000"]
            began = time.perf_counter()
            subprocess.run([*command, "--out", folder], check=True, capture_output=True)
            best = min(best, time.perf_counter() - began)
    return {"wall seconds": best}


def flatness() -> Result:
    """(e) Microseconds per request over batch size and prompt length."""
    found: Result = {}
    for label, sizes in (("batch", (16, 64, 256, 1024)), ("prompt", (64, 512, 4096))):
        costs = []
        for size in sizes:
            if label == "batch":
                engine, workload = worlds.engine(size), worlds.saturated(8000, size, 512, 128)
            else:
                engine, workload = worlds.engine(256), worlds.saturated(8000, 256, size, 128)
            seconds = fast(engine, partial(Mixed, engine.running, 16384), workload)
            costs.append(seconds / len(workload) * 1e6)
            found[f"{label} {size}: microseconds per request"] = costs[-1]
        found[f"{label}: largest over smallest"] = max(costs) / min(costs)
    return found


def leases() -> Result:
    """(f) A saturated EB run of 4,000 requests, and what leases save against asking at every step."""
    engine, workload = worlds.engine(), worlds.saturated(4000, 2048)
    leased = fast(engine, lambda: Exclusive(512, 48), workload)
    began = time.process_time()
    Simulator(engine, Exclusive(512, 48), workload, (Recorder(),), leases=False).run()
    return {"seconds": leased, "asking at every step takes times": (time.process_time() - began) / leased}


def asynchronous() -> Result:
    """(i) 5,000 conversations with asynchronous scheduling and a host, against the same card without."""
    engine, workload = engine_of_card(load_card("cal-h200-qwen3-8b")), worlds.conversations(5000)
    seconds = {False: float("inf"), True: float("inf")}
    for _ in range(5):
        for ahead in seconds:
            began = time.process_time()
            recorder = Recorder()
            policy = Mixed(engine.running, engine.batch_tokens)
            Simulator(engine, policy, workload, (recorder,), asynchronous=ahead).run()
            recorder.tables()
            seconds[ahead] = min(seconds[ahead], time.process_time() - began)
    return {
        "synchronous": seconds[False],
        "asynchronous": seconds[True],
        "times": seconds[True] / seconds[False],
    }


def caching() -> Result:
    """(j) Prefix caching: off; on where nothing is known of contents; on where they are known and private."""
    found: Result = {}
    races = {
        "conversations": (worlds.conversations(5000), lambda: Mixed(512, 16384)),
        "saturated eb": (worlds.saturated(4000, 1024, 512, 128), lambda: Exclusive(512, 32)),
    }
    for name, (workload, policy) in races.items():
        known = replace(workload, contents=private(workload.prompt))
        on = worlds.engine()
        runs = {
            "off": (on._replace(prefix_cache=False), workload),
            "on": (on, workload),
            "private": (on, known),
        }
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(5):  # in turn, so that a busy machine is so to all
            for which, (engine, requests) in runs.items():
                best[which] = min(best[which], fast(engine, policy, requests, tries=1))
        found[f"{name}, off: microseconds per request"] = best["off"] / len(workload) * 1e6
        found[f"{name}, on, contents unknown: times off"] = best["on"] / best["off"]
        found[f"{name}, on, nothing shared: times off"] = best["private"] / best["off"]
    return found


def planning() -> Result:
    """(g) Microseconds of plan() while prompts run, and of those per running request; the median call."""
    found: Result = {}
    for size in (64, 256, 1024):  # slots
        engine, workload = worlds.engine(size), worlds.saturated(8 * size, 2 * size, 512, 128)
        policies: dict[str, BatchPolicy] = {
            "mixed": Mixed(size, 16384),
            "sarathi-spf": ShortestFirst(size, 16384),
            "slai, nobody deferred": Slai(size, 16384, engine.cost),
            "slai, most deferred": Slai(size, 16384, engine.cost, between_tokens=5.0),
            "rad": Rad(size),
        }
        for name, policy in policies.items():
            times = plan_times(engine, policy, workload)
            found[f"{name}, {size}: microseconds"] = times[len(times) // 2]
            found[f"{name}, {size}: nanoseconds per request"] = times[len(times) // 2] / size * 1e3
    return found


def queued() -> Result:
    """(l) A plan while 100 decode and ten chat prompts of 0.5 s have just come, over how many others wait.

    They are late, or have no promise, or came within the last tenth of a second, or are of all kinds: late
    with weights, background, plain, of 100 tenants. The best of 15 calls after the first, which sorts them.
    """
    found: Result = {}
    engine = engine_of_card(load_card("cal-h200-qwen3-8b"))._replace(running=512, batch_tokens=8192)
    made: dict[str, Callable[[], BatchPolicy]] = {
        "keep": lambda: Keep(512, 8192, engine.cost),
        "slai": lambda: Slai(512, 8192, engine.cost, order="deadline"),
        "wait": lambda: Wait(512, engine.cost, thresholds="8"),
        "nested-wait": lambda: NestedWait(512, engine.cost, thresholds="8/4", ends="64/512"),
    }
    for name, make in made.items():
        for what in ("late", "no promise", "burst", "mixed"):
            costs = [_plan_over(make(), waiting, what) for waiting in QUEUES]
            for waiting, cost in zip(QUEUES, costs, strict=True):
                found[f"{name}, {what}, {waiting}: microseconds"] = cost
            found[f"{name}, {what}: 16,000 over 250"] = costs[QUEUES.index(16_000)] / costs[0]
    return found


def _plan_over(policy: BatchPolicy, waiting: int, what: str) -> float:
    """Microseconds of one plan."""
    ledger, rng = Ledger(Limits(8192, 512, 16), 800_000), np.random.default_rng(0)
    chat = Slo(0.5, 0.1)
    mix = (chat, Slo(0.5, 0.1, weight=10.0), Slo(), Slo(background=True))

    def join(id: int, slo: Slo, arrival: float) -> Entry:
        tenant = f"tenant {id % 100}" if what == "mixed" else ""
        entry = Entry(ledger, id, arrival, int(rng.integers(50, 4000)), 500, slo=slo, tenant=tenant)
        ledger.arrive(entry)
        policy.arrived(entry, arrival)
        return entry

    for id in range(100):
        entry = join(id, mix[id % len(mix)] if what == "mixed" else chat, 0.0)
        ledger.admit(entry)
        policy.admitted(entry, 0.0)
        entry.todo = 0
        ledger.join(entry, 0.0, True)
        policy.prefilled(entry, 0.0)
        ledger.kv_free -= entry.prompt
    for place in range(waiting):
        arrival = 5.0 * place / waiting if what in ("late", "mixed") else 9.9 + 0.1 * place / waiting
        others = {"no promise": Slo(), "mixed": mix[place % len(mix)]}
        join(100 + place, others.get(what, chat), arrival)
    for place in range(10):
        join(100 + waiting + place, chat, 9.95)
    ledger.now, best = 10.0, float("inf")
    policy.plan(ledger)
    for _ in range(15):
        began = time.perf_counter_ns()
        policy.plan(ledger)
        best = min(best, (time.perf_counter_ns() - began) / 1e3)
    return best


def plan_times(engine: Engine, policy: BatchPolicy, workload: Workload) -> list[float]:
    """Sorted microseconds of the calls that let prompts run while at least half of the slots decode."""
    times, plan = [], policy.plan

    def timed(view: View) -> Plan:
        began = time.perf_counter_ns()
        made = plan(view)
        took = time.perf_counter_ns() - began
        if made.prefill and len(view.decoding) >= engine.running // 2:
            times.append(took / 1e3)
        return made

    policy.plan = timed  # type: ignore[method-assign]
    Simulator(engine, policy, workload).run()
    return sorted(times)


def thousand() -> Result:
    """(h) 250,000 conversations on 1,000 engines behind round robin, in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.many_engines", "round-robin", "1000", "250000"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(answer.stdout))


def capacity() -> Result:
    """(k) The largest rate of every policy, 3,000 requests a run, in two processes."""
    command = [sys.executable, "-c", "from headgate.cli import main; main()", "plan", "capacity", "--policy"]
    command += ["all", "--requests", "3000", "--slo", "ttft=500ms@p50,tbt=100ms@p99"]
    command += ["--jobs", "2", "--cache", "none"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True)
    if done.returncode > 1:  # 1: the runs are too short for an answer
        done.check_returncode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"CPU seconds": spent, "wall seconds": time.perf_counter() - began}


def side_by_side() -> str:
    """What both builds measured last, as a table for README.md."""
    kept = [_kept(build) for build in ("pure", "compiled")]
    lines = ["| measure | goal | pure | compiled |", "|---|---|---|---|"]
    for row in GOALS.splitlines():
        measure, goal, race, key = (part.strip() for part in row.split("|"))
        values = [each.get(race, {}).get(key) for each in kept]
        shown = ["not measured" if value is None else f"{value:.3g}" for value in values]
        lines.append(f"| {measure} | {goal} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _kept(build: str) -> dict[str, Result]:
    path = HERE / f"latest-{build}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


RACES: dict[str, Callable[[], Result]] = {
    "plain": plain_race,
    "azure": azure,
    "million": million,
    "command-line": command_line,
    "flatness": flatness,
    "leases": leases,
    "asynchronous": asynchronous,
    "planning": planning,
    "queued": queued,
    "caching": caching,
    "engines": many_engines,
    "thousand": thousand,
    "capacity": capacity,
}


def main(names: list[str]) -> None:
    if names and names[0].startswith("--million="):
        print(json.dumps(one_million(names[0].partition("=")[2])))
        return
    unknown = [name for name in names if name not in RACES]
    if unknown:
        sys.exit(f"unknown race {unknown[0]!r}; choose from: {', '.join(RACES)}")
    build = "compiled" if compiled() else "pure"
    found: dict[str, Any] = _kept(build)
    print(f"build: {build}")
    for name in names or RACES:
        found[name] = RACES[name]()
        print(f"{name}: {(RACES[name].__doc__ or '').strip()}")
        for key, value in found[name].items():
            print(f"  {key:45} {value:12,.3f}")
    found["machine"] = {"python": platform.python_version(), "machine": platform.machine()}
    (HERE / f"latest-{build}.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"\n{side_by_side()}")


main(sys.argv[1:])
