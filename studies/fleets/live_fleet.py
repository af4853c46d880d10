"""The same router, the same requests: live before emulated engines, and in the simulator. Revenue of both.

Run: python -m studies.fleets.live_fleet [--virtual --seconds 120 --engines 8 --router least-loaded]

Two classes arrive at 1.3 times what the fleet can serve; patience in the queue is limited. Live and simulated
have the same policy object: it begins with the plan of the configuration and plans again while it runs. The
simulator's policy that knows the true rates beforehand stands beside it. A request's revenue counts when its
last token came before the end. Engines, router and clients run in one process. On the wall clock the card's
steps are slowed down so that shared cores keep up; KV leases and patience grow with them. With `--virtual`
time jumps, and nothing is ever late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from headgate.cost.card import load_card
from headgate.experiment.fleet import FleetSetup
from headgate.live.emulate import emulated
from headgate.live.route.config import Config, checked
from headgate.live.route.gate.policy import live_router as live_policy
from headgate.live.route.server import RouterApp
from headgate.methods.fluid.flows import TokenPrices
from headgate.methods.make import make_policy
from headgate.record.tables import Run
from headgate.sim.engine.engine import engine_of_card
from headgate.workloads.workload import Kind, Workload
from studies.fleets.virtual_loop import run_virtual

CARD, SLOTS = "linear-h200-qwen3-8b", 8
CLASSES = {"chat": (160, 80, 0.6), "batch": (2400, 30, 0.4)}  # prompt, output, share of the arrivals
PRICES = TokenPrices(0.0, 1.0)  # output tokens are paid
LEASE = 30.0  # seconds that KV is kept at full speed, vLLM's default
PATIENCE = 1.2  # seconds in the queue at full speed: simulated clients leave, the live router refuses them


def slow_card(folder: Path, factor: float) -> Path:
    """The card with steps that take so many times longer."""
    card = json.loads(files("headgate").joinpath(f"cards/{CARD}.json").read_text())
    for stage in card["coefficients"].values():
        for name, value in stage.items():
            if name not in ("free_decodes", "by_share"):
                stage[name] = value * factor
    card["name"] = "slow"
    path = folder / "slow.json"
    path.write_text(json.dumps(card))
    return path


def requests(given: argparse.Namespace, card: Path) -> Workload:
    """Poisson arrivals of both classes at `load` times the fleet's capacity by the fluid plan."""
    draw = np.random.default_rng(given.seed)
    engine = engine_of_card(load_card(card), SLOTS, 2048)
    probe = _workload(draw, 100.0, 200.0, PATIENCE)
    plan = FleetSetup(engine, given.engines, prices=PRICES).plan(probe)
    served = sum(plan.served) * given.engines
    return _workload(draw, given.load * served, given.seconds, PATIENCE * given.slow)


def _workload(draw: np.random.Generator, rate: float, seconds: float, patience: float) -> Workload:
    count = max(2, draw.poisson(rate * seconds))
    arrival = np.sort(draw.uniform(0, seconds, count))
    kind = draw.choice(len(CLASSES), count, p=[share for *_, share in CLASSES.values()])
    means = np.array([[prompt, output] for prompt, output, _ in CLASSES.values()])[kind]
    prompt = np.rint(means[:, 0] * draw.uniform(0.5, 1.5, count)).astype(int)
    output = np.rint(means[:, 1] * draw.uniform(0.5, 1.5, count)).astype(int)
    kinds = [Kind(name) for name in CLASSES]
    return Workload.of(
        prompt,
        output,
        arrival=arrival,
        kind=kind,
        kinds=kinds,
        patience=np.full(count, patience),
        name="overload",
    )


def simulated(given: argparse.Namespace, card: Path, workload: Workload, router: str, known: bool) -> Run:
    """The live policy, or the one that knows the true rates."""
    engine = engine_of_card(load_card(card), SLOTS, 2048)
    setup = FleetSetup(engine, given.engines, prices=PRICES)
    random.seed(given.seed)
    if known:
        made, _ = setup.router(router, {}, workload, given.seed)
    else:
        urls = [f"http://127.0.0.1:{port}" for port in range(1, given.engines + 1)]
        made = live_policy(configured(given, card, workload, router, urls), given.engines)
    return setup.run(lambda role: make_policy("mixed", {}, engine)[0], made, workload)


def revenue(run: Run, seconds: float) -> tuple[float, float]:
    """Per second, of requests that finished before the end; and the share of requests that did."""
    done = run.completed() & (run.requests["finished"] <= seconds)
    worth = PRICES.prompt * run.requests["prompt"][done] + PRICES.output * run.requests["output"][done]
    return float(worth.sum()) / seconds, float(done.mean())


def configured(
    given: argparse.Namespace, card: Path, workload: Workload, router: str, urls: Sequence[str]
) -> Config:
    """What a user would write of these requests and engines."""
    rate = len(workload) / given.seconds
    classes = [
        {"name": name, "match": {"header": name}, "prompt": prompt, "output": output,
         "rate": share * rate, "queue": 100_000}
        for name, (prompt, output, share) in CLASSES.items()
    ]  # fmt: skip
    return checked(
        {
            "front": {"port": 0, "admin": "127.0.0.1:0"},
            "limits": {
                "queue_ttl": float(workload.patience[0]),
                "inflight": 100_000,
                "first_token": 1000.0,
                "idle": 1000.0,
            },
            "router": {
                "name": router,
                "card": str(card),
                "prices": {"prompt": PRICES.prompt, "output": PRICES.output},
            },
            "classes": classes,
            "engines": [{"url": url, "slots": SLOTS} for url in urls],
            "kv": {"lease": LEASE * given.slow},
            "health": {"fails": 1000, "timeout": 60.0},
        }
    )


async def live(given: argparse.Namespace, card: Path, workload: Workload, router: str) -> tuple[float, float]:
    """The same before emulated engines: revenue, and the share served."""
    random.seed(given.seed)
    async with emulated(
        engines=given.engines,
        card=str(card),
        slots=SLOTS,
        budget=2048,
        model="m",
        kv_lease=LEASE * given.slow,
    ) as fleet:
        app = RouterApp(configured(given, card, workload, router, fleet))
        await app.start()
        try:
            worth, served = await _clients(app, workload, given.seconds)
            assert app.gate.fallen is None, app.gate.fallen
        finally:
            await app.stop()
        return worth / given.seconds, served / len(workload)


def tokens(row: int, count: int) -> list[int]:
    """A prompt whose first block is no other's: the simulated requests share nothing, and engines cache."""
    return [row + 1] + [0] * (count - 1)


async def _clients(app: RouterApp, workload: Workload, seconds: float) -> tuple[float, int]:
    names, found = list(CLASSES), [0.0, 0.0]
    start = time.monotonic()
    url = f"http://127.0.0.1:{app.port}/v1/completions"

    async def one(client: aiohttp.ClientSession, row: int) -> None:
        await asyncio.sleep(max(0.0, start + float(workload.arrival[row]) - time.monotonic()))
        prompt, output = int(workload.prompt[row]), int(workload.output[row])
        body = {"prompt": tokens(row, prompt), "max_tokens": output, "ignore_eos": True, "stream": True}
        headers = {"x-headgate-class": names[int(workload.kind[row])]}
        try:
            async with client.post(url, json=body, headers=headers) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: [DONE]") and time.monotonic() <= start + seconds:
                        found[0] += PRICES.prompt * prompt + PRICES.output * output
                        found[1] += 1
        except aiohttp.ClientError:
            pass

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        tasks = [asyncio.create_task(one(client, row)) for row in range(len(workload))]
        await asyncio.sleep(seconds + 0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found[0], int(found[1])


def compare(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Both, for every router."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        card = slow_card(Path(scratch), given.slow)
        workload = requests(given, card)
        for router in given.router:
            same, ideal = (simulated(given, card, workload, router, known) for known in (False, True))
            work = live(given, card, workload, router)
            real, served = run_virtual(work) if given.virtual else asyncio.run(work)
            worth, share = revenue(same, given.seconds)
            found[router] = {"simulated": worth, "live": real, "share": share, "live_share": served}
            found[router]["known"] = revenue(ideal, given.seconds)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--slow", type=float, default=40.0, help="steps take so many times longer")
    parser.add_argument("--load", type=float, default=1.3, help="times the fleet's capacity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--router", action="append")
    parser.add_argument("--virtual", action="store_true", help="on a clock that jumps")
    given = parser.parse_args()
    given.router = given.router or ["least-loaded", "density-deep"]
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    for router, each in compare(given).items():
        ratio = each["live"] / each["simulated"]
        print(
            f"{router:<16} revenue/s simulated {each['simulated']:6.1f} (rates known {each['known']:6.1f})  "
            f"live {each['live']:6.1f}  live/simulated {ratio:.3f}  "
            f"served {each['share']:.3f}, live {each['live_share']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
