"""What it gains that decodes prefer the engine of their prompt: KV that need not be copied."""

from __future__ import annotations

import numpy as np

from headgate.core.fleet import MIXED, SOLO, Fleet, Move, RoutePolicy, Stage
from headgate.experiment.fleet import make_router
from headgate.methods.fluid.gates import Gated, SoloFirst, pick
from headgate.methods.fluid.planner import plan_fluid
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.fleet.fleet import FleetSimulator
from headgate.sim.fleet.kv_handover import Transfer
from studies.fleets.tokens import Run, engine, requests
from studies.fleets.worlds import INSTANCES

SLOW = Transfer(0.05, 2e-5)  # 110 ms for a prompt of 3,000 tokens
ENGINES, SECONDS, WARM, SEEDS = 20, 300.0, 100.0, 3
CASES = (("A1", "gate-and-route+"), ("B1", "gate-and-route+"), ("C1", "gate-and-route+"), ("A1", "gf-wsp"))


class Drawn(SoloFirst):
    """The paper's greedy router: any engine of the pool, each with the same chance."""

    def next(self, fleet: Fleet) -> Move | None:
        """The head of the queue."""
        places = fleet.open[SOLO] or fleet.open[MIXED] or fleet.open["any"]
        return Move(next(iter(fleet.handoff)), pick(places, self.draw), Stage.DECODE) if places else None


class Counting:
    """Counts decodes by where they start."""

    def __init__(self, router: RoutePolicy) -> None:
        self.home = self.all = 0
        self._at: dict[int, int] = {}
        self._moved = router.moved
        router.moved = self.moved  # type: ignore[method-assign]

    def moved(self, request: object, move: Move, now: float) -> None:
        """Counted and passed on."""
        if move.stage is Stage.DECODE:
            self.all += 1
            self.home += self._at.pop(move.request) == move.replica
        else:
            self._at[move.request] = move.replica
        self._moved(request, move, now)  # type: ignore[arg-type]


def study(case: Run, at_home: bool) -> tuple[float, float, float]:
    """Share of decodes at home, mean time from first to second token in ms, revenue over the plan's."""
    instance = INSTANCES[case.instance]
    plan, one = plan_fluid(instance), engine(instance)
    router = make_router(case.router, plan, case.engines, case.seed)
    assert isinstance(router, Gated)
    if not at_home:
        router.placement = Drawn(router.draw)
    counting = Counting(router)
    fleet = FleetSimulator(
        one,
        case.engines,
        lambda role: Mixed(one.running, one.batch_tokens),
        router,
        requests(instance, case),
        transfer=SLOW,
    )
    fleet.run()
    table = fleet.recorder.tables()["requests"]
    done = (table["finished"] >= case.warm) & (table["finished"] < case.warm + case.seconds)
    done &= table["how"] <= 1
    worth = np.array(instance.values())[table["kind"][done].astype(np.int64)].sum()
    long = done & (table["output"] > 1)
    per_token = (table["finished"][long] - table["first_token"][long]) / (table["output"][long] - 1)
    revenue = float(worth) / case.engines / case.seconds / plan.revenue
    return counting.home / max(1, counting.all), 1000 * float(per_token.mean()), revenue


def main(quick: bool) -> None:
    print("\n| instance, router | decodes at home, drawn / preferred | TPOT mean, ms | revenue / plan |")
    print("|---|---|---|---|")
    for name, router in CASES:
        runs = [
            Run(name, router, "exponential", s, ENGINES, SECONDS, WARM) for s in range(1 if quick else SEEDS)
        ]
        found = [np.mean([study(run, home) for run in runs], axis=0) for home in (False, True)]
        (a, b, c), (x, y, z) = (each.tolist() for each in found)
        cells = f"{100 * a:.1f} / {100 * x:.1f} % | {b:.2f} / {y:.2f} | {c:.3f} / {z:.3f}"
        print(f"| {name}, `{router}` | {cells} |", flush=True)
