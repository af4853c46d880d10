"""`headgate route`: the simulator's routers before real engines."""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

from headgate.cli.top import EVERY, Frame, view
from headgate.core.errors import InputError

if TYPE_CHECKING:
    from headgate.live.route.config import Config
    from headgate.live.route.run import Demo


EXAMPLES = """Route requests to several vLLM servers; OpenAI-compatible.

With any of headgate's routers. Streams pass byte for byte. Requests wait in the router, not in the engines;
failed calls are tried elsewhere before the first token; hang-ups reach the engine. Metrics, books and
drain are on the address of --admin.

\b
Examples:
  headgate route --engine http://a:8000 --engine http://b:8000
  headgate route --engine http://a:8000 --engine http://b:8000 --router power-of-two --port 9000
  headgate route --config fleet.toml --check
  headgate route --config fleet.toml --router density-deep --card cal-h200-qwen3-8b
  headgate route --engine http://a:8000 --engine http://b:8000 --router split:prefill=1
  headgate route --new-key alice  # a key, and its line for the key file
  headgate route --demo  # four emulated engines, a load and a live view
"""
FRONT, POLICY = "Front", "Router"
ROUTER = "NAME, NAME:PARAMETER=VALUE,... or FILE.py:Class (default: least-loaded)"


def _option(help: str, panel: str, *flags: str) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel)


def route(
    engine: Annotated[list[str] | None, typer.Option(help="URL of an engine; repeat it")] = None,
    config: Annotated[str | None, typer.Option(help="TOML file; flags are laid over it")] = None,
    router: Annotated[str | None, _option(ROUTER, POLICY)] = None,
    card: Annotated[str | None, _option("cost card of the engines, for routers that plan", POLICY)] = None,
    slots: Annotated[int | None, _option("requests at once of every --engine (256)", POLICY)] = None,
    seats: Annotated[int | None, typer.Option("--seats", hidden=True)] = None,
    host: Annotated[str | None, _option("address (127.0.0.1)", FRONT)] = None,
    port: Annotated[int | None, _option("port, 0 for any (8000)", FRONT)] = None,
    admin: Annotated[str | None, _option("address of metrics and drain (127.0.0.1:9300)", FRONT)] = None,
    processes: Annotated[
        int | None, _option("so many processes on one port, replaced without loss by SIGUSR2", FRONT)
    ] = None,
    store: Annotated[
        str | None, _option("Redis or Valkey through which routers share engines (redis://HOST)", FRONT)
    ] = None,
    key_file: Annotated[str | None, _option("API keys of clients", FRONT)] = None,
    open: Annotated[bool, _option("no keys on an address others reach", FRONT, "--open")] = False,
    access_log: Annotated[str | None, _option("JSON lines, to a file or -", FRONT)] = None,
    trace: Annotated[str | None, _option("file that headgate trace and compare --trace read", FRONT)] = None,
    check: Annotated[bool, typer.Option("--check", help="say what would be done and leave")] = False,
    new_key: Annotated[str | None, typer.Option(help="make a key of this name and leave")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="emulated engines, a load and a live view")] = False,
    seconds: Annotated[float | None, typer.Option(help="with --demo: leave after so long")] = None,
) -> None:
    """Check the settings and serve."""
    _need_packages()
    from headgate.live.route.config import read_config

    if new_key is not None:
        _print_key(new_key)
        return
    logging.basicConfig(format="headgate route: %(message)s", level=logging.WARNING)
    fronts = {
        "host": host, "port": port, "admin": admin, "key_file": key_file, "access_log": access_log,
        "trace": trace, "open": open or None, "processes": processes,
    }  # fmt: skip
    flags = {"front": _given(fronts), "router": _given({"name": router, "card": card})}
    if store is not None:
        flags["replicas"] = {"store": store}
    if seats is not None:
        logging.warning("--seats is the old name of --slots; rename it")
        slots = seats if slots is None else slots
    if seconds is not None and not demo:
        raise InputError("--seconds belongs to --demo; drop it, or give --demo")
    if demo:
        own = {"--engine": engine, "--config": config, "--slots": slots, "--check": check}
        if given := [name for name, value in own.items() if value]:
            raise InputError(f"--demo brings its own engines and settings; drop {given[0]}")
        logging.getLogger().setLevel(logging.CRITICAL)  # the view shows what happens
        asyncio.run(_demo(flags, seconds))
        return
    urls = [{"url": url} | _given({"slots": slots}) for url in engine or []]

    def read() -> Config:
        return read_config(config, flags, urls)

    if check:
        _check(read())
        return
    from headgate.live.route.run import serve

    serve(read(), read, config, lambda line: print(f"headgate route: {line}", flush=True))


def _need_packages() -> None:
    try:
        importlib.import_module("headgate.live.route.server")
    except ImportError as error:
        raise InputError(
            f"route needs package {error.name}; pip install headgate, in a clone pip install ."
        ) from None


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _print_key(name: str) -> None:
    from headgate.live.route.classes import new_key

    key, line = new_key(name)
    print(f"key for the client (shown once): {key}")
    print(f"line for the key file:           {line}")


def _check(config: Config) -> None:
    """What the router would do with this configuration."""
    from headgate.live.route.classes import read_keys
    from headgate.live.route.engines import discover, engine_key
    from headgate.live.route.gate.policy import LivePolicy, rests_on
    from headgate.live.route.server import engine_tls, server_tls

    engines = asyncio.run(discover(config))
    policy = LivePolicy(config, max(len(engines), 1))
    keys = read_keys(config.front.key_file)
    server_tls(config.front)
    engine_tls(config.front)
    for each in engines:
        engine_key(each)
    print(f"listen on {config.front.host}:{config.front.port}, admin on {config.front.admin}")
    many = f"{len(engines)} engine{'s' * (len(engines) != 1)}"
    print(f"{rests_on(config, [each.slots for each in engines])}; {many}:")
    for each in engines:
        group = f", KV group {each.kv_group}" if each.kv_group else ""
        prompts = each.prompts_at_once or policy.prompts_at_once(each.slots)
        print(f"  {each.url}  {each.slots} slots, {prompts} prompts at once, role {each.role}{group}")
    names = ", ".join([*(each.name for each in config.classes), config.default.name])
    print(f"classes: {names}; queue of {config.limits.queue} each, {config.limits.queue_ttl:g} s at most")
    if config.front.processes is not None:
        print(f"processes: {config.front.processes}, each with an admin port of its own")
    if config.replicas.store is not None:
        where = config.replicas.store.rpartition("@")[2]
        print(f"shared with other routers through {where} as {config.replicas.name!r}")
    for line in config.doubts(keys.names):
        print(f"warning: {line}")
    print(
        "keys: required" if keys.required else "keys: none, every client that reaches the address is served"
    )


async def _demo(flags: dict[str, dict[str, Any]], seconds: float | None) -> None:
    """Until an interrupt, or for so many seconds."""
    from headgate.live.route.run import demo

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
                live.update(_seen(shown))
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), EVERY)
            live.update(_seen(shown))
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


def _seen(shown: Demo) -> Group:
    app = shown.app
    frame = Frame(app.view.snapshot(app.now()), app.view.history()["rows"])
    where = f"clients http://127.0.0.1:{app.port}, page http://127.0.0.1:{app.admin_port}/"
    return view(frame, notes=(where, shown.event))


route.__doc__ = EXAMPLES
