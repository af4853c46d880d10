"""headgate from Python: an engine from a card, runs of one engine and of fleets, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.core.errors import InputError
from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy, Observer
from headgate.cost.card import load_card
from headgate.experiment.build import by_tenant, cache_record, described, make_engine, refuse_endless
from headgate.experiment.fleet import PRICES, FleetSetup, finished, transfer_time
from headgate.experiment.run import composes_ahead
from headgate.experiment.settings import ManyEngines, experiment
from headgate.methods import make
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import PATIENT_DOG, Simulator
from headgate.sim.fleet.fleet import Outage
from headgate.sim.fleet.kv_handover import Transfer
from headgate.workloads.workload import Workload

if TYPE_CHECKING:
    from headgate.stats.comparison import Comparison


def card_engine(
    card: str | Path,
    slots: int | None = None,
    budget: int | None = None,
    kv_tokens: int | None = None,
    speculate: str | None = None,
) -> Engine:
    """An engine with a card's step times; what is left out is as on the command line.

    Args:
        card: a built-in name (`headgate doctor` lists them) or a file of `headgate calibrate`.
        slots: requests that may run at once, vLLM's `max_num_seqs` (default: 256).
        budget: tokens in one step, vLLM's `max_num_batched_tokens` (default: 8192).
        kv_tokens: KV memory in tokens (default: the card's).
        speculate: speculative decoding, such as "3:accept=0.7" (default: off).

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=128)
        >>> engine.running, engine.batch_tokens
        (128, 8192)
    """
    words = {"slots": slots, "budget": budget, "kv_tokens": kv_tokens, "speculate": speculate}
    return make_engine(experiment(words), load_card(card))


def make_policy(text: str, engine: Engine) -> BatchPolicy:
    """A policy as the command line names it: NAME, NAME:PARAMETER=VALUE,... or FILE.py:CLASS.

    Its slots, budget and step cost are the engine's unless the text says otherwise.

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=128)
        >>> headgate.make_policy("eb:refill=16", engine).refill
        16
    """
    name, settings = make.split_name(text)
    return make.make_policy(name, settings, engine)[0]


def make_router(text: str, engine: Engine, engines: int, workload: Workload, seed: int = 0) -> RoutePolicy:
    """A router as the command line names it, for so many of these engines.

    Routers that follow a fluid plan get one made from the workload's kinds and rates; routers that need
    chance draw from the seed.

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b")
        >>> requests = headgate.Workload.of([512] * 8, [64] * 8)
        >>> headgate.make_router("split:prefill=1", engine, 4, requests).roles(4)
        ('prefill', 'decode', 'decode', 'decode')
    """
    name, settings = make.split_name(text, "router")
    return FleetSetup(engine, engines).router(name, settings, workload, seed)[0]


def simulate(
    engine: Engine,
    policy: BatchPolicy | str,
    workload: Workload,
    *,
    leases: bool = True,
    asynchronous: bool | None = None,
    watchdog: float = PATIENT_DOG,
    observers: tuple[Observer, ...] = (),
    lost: int = 0,
) -> Run:
    """Serve the workload on one engine, in virtual time, and hand over the run's tables.

    Args:
        engine: what the steps cost and what fits.
        policy: a fresh policy, which the run changes, or its name as for `make_policy`.
        workload: the requests.
        leases: False asks the policy at every step; the schedule is the same, only slower.
        asynchronous: compose each step while the one before it runs, as vLLM does. The engine knows limits,
            not lengths: where the output is shorter than `limit`, its request is in one step more. None: so
            where the engine's step cost knows its host, as calibrated cards do, and nothing is `lost`.
        watchdog: seconds of the run without progress after which a starving request stops it.
        observers: more listeners beside the recorder.
        lost: output tokens that an evicted request loses and must bring again; engines lose none.

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=64)
        >>> requests = headgate.Workload.of([512] * 100, [128] * 100)
        >>> run = headgate.simulate(engine, "mixed", requests)
        >>> int(run.completed().sum())
        100
    """
    _check_requests(workload, engine)
    if lost < 0:
        raise InputError(f"lost={lost} output tokens; expect 0 or more")
    if lost and asynchronous:
        raise InputError("an asynchronous engine loses no output at evictions; give one of the two")
    label = policy if isinstance(policy, str) else type(policy).__name__
    recorder = Recorder([kind.name for kind in workload.kinds])
    simulator = Simulator(
        engine,
        make_policy(policy, engine) if isinstance(policy, str) else policy,
        workload,
        (recorder, *observers),
        leases=leases,
        asynchronous=not lost and composes_ahead(asynchronous, engine.cost.host),
        lost=lost,
        watchdog=watchdog,
    )
    simulator.run()
    about: dict[str, Any] = {"driver": "simulator", "policy": label, "label": label, "outcome": "finished"}
    limits = {"kv_tokens": engine.kv_tokens, "longest": engine.longest, **cache_record([simulator.replica])}
    if engine.speculation:
        about["speculation"] = engine.speculation.said()
    tables = by_tenant(recorder.tables(), workload, simulator.arrivals.rows)
    return Run({**about, **limits, **described(workload)}, **tables)


def simulate_fleet(
    engine: Engine,
    policy: str | Callable[[str], BatchPolicy],
    router: str | RoutePolicy,
    workload: Workload,
    *,
    engines: int,
    transfer: Transfer | None = None,
    seed: int = 0,
    asynchronous: bool | None = None,
    outages: Sequence[Outage] = (),
    watchdog: float = PATIENT_DOG,
    lock_step: bool = False,
) -> Run:
    """Serve the workload on several equal engines behind a router, in virtual time.

    Args:
        engine: one of the engines.
        policy: the policy of every engine: a name as for `make_policy`, or a function from an engine's role
            ("any", "mixed", "solo", "prefill", "decode") to a fresh policy.
        router: a fresh router, or its name as for `make_router`.
        workload: the requests of the whole fleet.
        engines: how many.
        transfer: what it takes to hand KV from one engine to another (default: that of the command line).
        seed: for routers that draw.
        asynchronous: policies see arrivals and free slots a step late, as in vLLM. None: as for `simulate`.
        outages: engines that fail or drain, and when they come back.
        lock_step: the engines are data-parallel ranks that step together; the router is not asked.
        watchdog: seconds of the run without progress after which a starving request stops it.

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=32)
        >>> requests = headgate.Workload.of([512] * 40, [64] * 40)
        >>> run = headgate.simulate_fleet(engine, "mixed", "round-robin", requests, engines=4)
        >>> sorted(set(run.requests["replica"].tolist()))
        [0, 1, 2, 3]
    """
    _check_requests(workload, engine)
    if engines < 1:
        raise InputError(f"engines={engines}; a fleet needs at least 1")
    ahead = composes_ahead(asynchronous, engine.cost.host)
    between = transfer or transfer_time(ManyEngines())
    setup = FleetSetup(engine, engines, between, PRICES, watchdog, ahead, tuple(outages), lock_step)
    if isinstance(router, str):
        named, chosen = router, make_router(router, engine, engines, workload, seed)
    else:
        named, chosen = type(router).__name__, router
    label = f"{named} {policy}" if isinstance(policy, str) else named
    fresh = policy if callable(policy) else lambda role: make_policy(policy, engine)
    about = {"policy": policy if isinstance(policy, str) else "by role", "router": named, "label": label}
    return finished(setup.run(fresh, chosen, workload, about=about))


def _check_requests(workload: object, engine: Engine) -> None:
    if not isinstance(workload, Workload):
        remedy = "give headgate.generate(...) or headgate.Workload.of(...)"
        if isinstance(workload, tuple):
            remedy = "read_trace gives two things; write requests, bad_rows = headgate.read_trace(FILE)"
        raise InputError(f"the requests are a {type(workload).__name__}, not a Workload; {remedy}")
    refuse_endless(workload, engine)


def compare(
    runs: Mapping[str, Run | Sequence[Run]], baseline: str | None = None, window: str = "middle"
) -> Comparison:
    """Runs of the same requests under several policies, as paired differences with 95 % intervals.

    Args:
        runs: for each policy its run, or one run per seed (the same seeds for every policy).
        baseline: the policy that others are compared with (default: the first).
        window: "middle" leaves out warm-up and cool-down, "all" takes everything.

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=64)
        >>> requests = headgate.generate(
        ...     500,
        ...     prompt=headgate.length_law("uniform", 512),
        ...     output=headgate.length_law("uniform", 128),
        ...     clients=96,
        ... )
        >>> runs = {name: headgate.simulate(engine, name, requests) for name in ("mixed", "v0")}
        >>> found = headgate.compare(runs)
        >>> found.rows[0].metric, found.rows[0].others["v0"].verdict
        ('request throughput', 'worse')
    """
    from headgate.stats import comparison

    if not isinstance(runs, Mapping):
        raise InputError(
            'compare takes runs by name, not a list; write compare({"mixed": run, "eb+": other})'
        )
    if not runs:
        raise InputError("no runs to compare; give at least two")
    by_name = {name: [own] if isinstance(own, Run) else list(own) for name, own in runs.items()}
    return comparison.compare(by_name, next(iter(runs)) if baseline is None else baseline, window)
