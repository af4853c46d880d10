"""A day of traffic on a fleet that scales by rules: `python -m studies.autoscale day|evening [RULE...]`.

Rates are those of a day (`day_rates.csv`), lengths those of Azure's conversations, drawn anew for each
request; arrivals are Poisson's with a rate that changes linearly between the middles of ten minutes. Every
rule meets the same requests. Results go to results/SPAN-RULE.json; tables are of all that are there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.cost.card import load_card
from headgate.experiment.build import make_workload
from headgate.experiment.fleet import FleetSetup
from headgate.experiment.settings import experiment
from headgate.methods.make import make_policy
from headgate.methods.scaling import read_scaling, work_of
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine, engine_of_card
from headgate.workloads.workload import Workload

HERE = Path(__file__).parent
CARD, MOST, BUDGET = "derived:Qwen3-32B@A100", 22, 2048
SCALE = 0.5  # of the rates
SPANS = {"day": (0.0, 24.0), "evening": (18.5, 3.0)}  # hours: begin, length
TTFT, TPOT = 3.0, 0.15  # promised, in seconds
COMMON = "floor=3,start=180s,hold=300s,every=15s"
RULES = {
    "fixed": f"fixed:{COMMON}",
    "queue-5": f"queue:{COMMON},per_engine=5",
    "queue-1": f"queue:{COMMON},per_engine=1",
    "load-16": f"load:{COMMON},per_engine=16",
    "load-30": f"load:{COMMON},per_engine=30",
    "plan": f"plan:{COMMON},target=0.7",
    "plan-60": f"plan:{COMMON},target=0.6",
}


def requests_of(span: str, seed: int = 0) -> Workload:
    """The requests of a part of the day."""
    rng = np.random.default_rng(seed)
    begin, hours = SPANS[span]
    starts, rates = np.loadtxt(HERE / "day_rates.csv", delimiter=",", skiprows=1).T
    rates, peak = SCALE * rates, SCALE * float(rates.max())
    times = np.cumsum(rng.exponential(1 / peak, int(3600 * hours * peak * 1.05) + 100))
    times = times[times < 3600 * hours]
    times = times[rng.random(len(times)) < np.interp(3600 * begin + times, starts + 300, rates) / peak]
    lengths, _ = make_workload(experiment({"trace": "azure-conv"}))
    drawn = rng.integers(0, len(lengths), len(times))
    return Workload.of(lengths.prompt[drawn], lengths.output[drawn], arrival=times)


def kept(run: Run) -> NDArray[np.bool_]:
    """The requests whose first token and whose mean gap came in time."""
    seen = run.requests
    first, end, tokens = seen["first_token"], seen["finished"], seen["output"]
    gap = (end - first) / np.maximum(tokens - 1, 1)
    with np.errstate(invalid="ignore"):
        return np.asarray((first - seen["arrival"] <= TTFT) & (gap <= TPOT))


def one(rule: str, engine: Engine, requests: Workload) -> dict[str, Any]:
    scaling = read_scaling(rule, MOST)
    setup = FleetSetup(engine, scaling.ceiling, scaling=scaling, asynchronous=False)
    router, _ = setup.router("least-loaded", {}, requests)
    begun = time.process_time()
    run = setup.run(lambda role: make_policy("mixed", {}, engine)[0], router, requests)
    good, waited = kept(run), run.requests["first_token"] - run.requests["arrival"]
    hour = (run.requests["arrival"] // 3600).astype(int)
    return {
        "setting": rule,
        "card": CARD,
        "requests": len(requests),
        "outcome": run.meta["outcome"],
        **run.meta["autoscale"],
        "kept": float(good.mean()),
        "worst_hour": min(float(good[hour == each].mean()) for each in range(hour.max() + 1)),
        "ttft_p50": float(np.median(waited)),
        "ttft_p99": float(np.quantile(waited, 0.99)),
        "cpu_s": round(time.process_time() - begun, 1),
    }


def table(span: str) -> str:
    lines = [
        "| rule | settings | engine-hours | engines | promises kept | worst hour | TTFT p50 / p99, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in RULES:
        path = HERE / "results" / f"{span}-{name}.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            settings = found["setting"].replace(COMMON, "").partition(":")[2].strip(",")
            lines.append(
                f"| `{name}` | {settings} | {found['engine_hours']:,.1f} "
                f"| {found['least']} to {found['most']} "
                f"| {100 * found['kept']:.2f} % | {100 * found['worst_hour']:.1f} % "
                f"| {found['ttft_p50']:.2f} / {found['ttft_p99']:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    span, *names = sys.argv[1:] or ["evening"]
    engine, requests = engine_of_card(load_card(CARD), budget=BUDGET), requests_of(span)
    each = work_of(engine.cost, engine.running, engine.batch_tokens, engine.kv_tokens)
    bound = 1 / each(float(requests.prompt.mean()), float(requests.output.mean()))
    print(f"{len(requests):,} requests; an engine serves at most {bound:.2f} a second")
    for name in names or RULES:
        found = one(RULES[name], engine, requests)
        text = json.dumps(found, indent=2) + "\n"
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / f"{span}-{name}.json").write_text(text, encoding="utf-8")
    print(table(span))


if __name__ == "__main__":
    main()
