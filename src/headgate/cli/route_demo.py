"""`headgate route --demo`: a live view of a router before emulated engines."""

from __future__ import annotations

import asyncio
import logging
import signal
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from headgate.live.route.demo import Demo

EVERY = 0.5  # seconds


def run_demo(flags: dict[str, dict[str, Any]], seconds: float | None) -> None:
    """Until an interrupt, or for so many seconds."""
    logging.getLogger().setLevel(logging.CRITICAL)  # the view shows what happens
    asyncio.run(_run(flags, seconds))


async def _run(flags: dict[str, dict[str, Any]], seconds: float | None) -> None:
    from headgate.live.route.demo import demo

    console, stop = Console(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with demo(flags) as shown:
        load = asyncio.create_task(shown.run())
        if seconds is not None:
            loop.call_later(seconds, stop.set)
        with Live(console=console, refresh_per_second=4, transient=False) as live:
            while not stop.is_set() and not load.done():
                live.update(view(shown))
                try:
                    await asyncio.wait_for(stop.wait(), EVERY)
                except TimeoutError:
                    continue
            live.update(view(shown))
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


def view(shown: Demo) -> Group:
    """Engines, classes and the plan."""
    app = shown.app
    title = Text(f"headgate route: {app.config.router.name} before {len(app.upstreams)} emulated engines")
    where = Text(f"http://127.0.0.1:{app.port}   admin http://127.0.0.1:{app.admin_port}/metrics")
    return Group(title, where, _engines(shown), _classes(shown), Text(shown.event), Text(_plan(shown)))


def _engines(shown: Demo) -> Table:
    from headgate.live.route.describe import described

    table = Table(title="engines", title_justify="left", box=SIMPLE_HEAD)
    for name in ("engine", "status", "role", "prompts", "decodes", "seats", "KV", "TTFT", "errors"):
        table.add_column(name, justify="left" if name in ("status", "role") else "right")
    for upstream in shown.app.upstreams.values():
        each = described(upstream, shown.app)
        table.add_row(
            str(each["id"]), each["status"], each["role"], str(each["prompts"]), str(each["decodes"]),
            str(each["seats"]), f"{100 * each['kv_usage']:.0f} %", f"{each['first_token_s']:.2f} s",
            str(upstream.breaker.opened),
        )  # fmt: skip
    return table


def _classes(shown: Demo) -> Table:
    table = Table(title="classes", title_justify="left", box=SIMPLE_HEAD)
    for name in ("class", "queue", "sent", "served", "refused", "gave up", "broken", "tokens", "TTFT p50"):
        table.add_column(name, justify="left" if name == "class" else "right")
    for name, tally in shown.tallies.items():
        queue = len(shown.app.gate.roster.queues[name])
        first = f"{median(tally.first):.2f} s" if tally.first else "-"
        numbers = (queue, tally.sent, tally.done, tally.refused, tally.gave_up, tally.broken, tally.tokens)
        table.add_row(name, *map(str, numbers), first)
    return table


def _plan(shown: Demo) -> str:
    plan = shown.app.policy.described(shown.app.gate.seconds)
    if plan is None:
        return ""
    served = ", ".join(
        f"{name} {each['served']:.1f} of {each['rate']:.1f}/s" for name, each in plan["classes"].items()
    )
    return f"plan, {plan['age_s']:.0f} s old, serves {served}"
