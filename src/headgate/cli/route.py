"""`headgate route`: the simulator's routers before real engines."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.core.errors import InputError

if TYPE_CHECKING:
    from headgate.live.route.config import Config

EXAMPLES = """Route requests to several vLLM servers; OpenAI-compatible.

With any of headgate's routers. Streams pass byte for byte. Requests wait in the router, not in the engines;
failed calls are tried elsewhere before the first token; hang-ups reach the engine. Needs aiohttp, msgspec
and prometheus-client (the extra `route`). Metrics, books and drain are on the address of --admin.

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


def route(
    engine: Annotated[list[str] | None, typer.Option(help="URL of an engine; repeat it")] = None,
    config: Annotated[str | None, typer.Option(help="TOML file; flags are laid over it")] = None,
    router: Annotated[
        str | None,
        typer.Option(
            help="NAME, NAME:PARAMETER=VALUE,... or FILE.py:Class (default: least-loaded)",
            rich_help_panel=POLICY,
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(help="cost card of the engines, for routers that plan", rich_help_panel=POLICY),
    ] = None,
    seats: Annotated[
        int | None, typer.Option(help="requests at once of every --engine (256)", rich_help_panel=POLICY)
    ] = None,
    host: Annotated[str | None, typer.Option(help="address (127.0.0.1)", rich_help_panel=FRONT)] = None,
    port: Annotated[int | None, typer.Option(help="port, 0 for any (8000)", rich_help_panel=FRONT)] = None,
    admin: Annotated[
        str | None, typer.Option(help="address of metrics and drain (127.0.0.1:9300)", rich_help_panel=FRONT)
    ] = None,
    key_file: Annotated[str | None, typer.Option(help="API keys of clients", rich_help_panel=FRONT)] = None,
    open: Annotated[
        bool, typer.Option("--open", help="no keys on an address others reach", rich_help_panel=FRONT)
    ] = False,
    access_log: Annotated[
        str | None, typer.Option(help="JSON lines, to a file or -", rich_help_panel=FRONT)
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="file that headgate trace and compare --trace read", rich_help_panel=FRONT),
    ] = None,
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
        "trace": trace, "open": open or None,
    }  # fmt: skip
    flags = {"front": _given(fronts), "router": _given({"name": router, "card": card})}
    if seconds is not None and not demo:
        raise InputError("--seconds belongs to --demo; drop it, or give --demo")
    if demo:
        own = {"--engine": engine, "--config": config, "--seats": seats, "--check": check}
        if given := [name for name, value in own.items() if value]:
            raise InputError(f"--demo brings its own engines and settings; drop {given[0]}")
        from headgate.cli.route_demo import run_demo

        run_demo(flags, seconds)
        return
    urls = [{"url": url} | _given({"seats": seats}) for url in engine or []]

    def read() -> Config:
        return read_config(config, flags, urls)

    found = read()
    if check:
        _check(found)
        return
    _serve(found, read, config)


def _need_packages() -> None:
    try:
        importlib.import_module("headgate.live.route.app")
    except ImportError as error:
        raise InputError(
            f'route needs package {error.name}; pip install "headgate[route]", in a clone ".[route]"'
        ) from None


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _print_key(name: str) -> None:
    from headgate.live.route.keys import new_key

    key, line = new_key(name)
    print(f"key for the client (shown once): {key}")
    print(f"line for the key file:           {line}")


def _check(config: Config) -> None:
    """What the router would do with this configuration."""
    import asyncio

    from headgate.live.route.discovery import discover
    from headgate.live.route.keys import read_keys
    from headgate.live.route.policy import LivePolicy, rests_on
    from headgate.live.route.server import engine_tls, server_tls
    from headgate.live.route.upstream import engine_key

    engines = asyncio.run(discover(config))
    policy = LivePolicy(config, max(len(engines), 1))
    keys = read_keys(config.front.key_file)
    server_tls(config.front)
    engine_tls(config.front)
    for each in engines:
        engine_key(each)
    print(f"listen on {config.front.host}:{config.front.port}, admin on {config.front.admin}")
    many = f"{len(engines)} engine{'s' * (len(engines) != 1)}"
    print(f"{rests_on(config, [each.seats for each in engines])}; {many}:")
    for each in engines:
        group = f", KV group {each.kv_group}" if each.kv_group else ""
        prompts = each.prompts_at_once or policy.prompts_at_once(each.seats)
        print(f"  {each.url}  {each.seats} seats, {prompts} prompts at once, role {each.role}{group}")
    names = ", ".join([*(each.name for each in config.classes), config.default.name])
    print(f"classes: {names}; queue of {config.limits.queue} each, {config.limits.queue_ttl:g} s at most")
    for line in config.doubts(keys.names):
        print(f"warning: {line}")
    print("keys: required" if keys.required else "keys: none, everybody who reaches the address is served")


def _serve(config: Config, read: Any, path: str | None) -> None:
    from headgate.live.route.run import serve

    serve(config, read, path, lambda line: print(f"headgate route: {line}", flush=True))


route.__doc__ = EXAMPLES
