"""`headgate route`: the simulator's routers before real engines; `headgate top`: one of either, live."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import localtime, strftime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headgate.cli.help import panelled as _option
from headgate.core.errors import InputError

if TYPE_CHECKING:
    import aiohttp

    from headgate.live.route.config import Config
    from headgate.live.route.run import Demo
    from headgate.live.route.view.counters import EngineView


EVERY = 1.0  # seconds
RETRY = 2.0
POINTS = 180  # of the timeline
LARGEST = 16 << 20  # bytes of an answer
WIDE = 160  # columns where there is no terminal, so that no line is broken
LOST = "connection lost, retrying"
URL = typer.Argument(help="of a router's --admin or of an engine (http://127.0.0.1:9300)", show_default=False)
Row = dict[str, Any]


class Frame(NamedTuple):
    shown: Row
    history: list[list[float | None]]
    lost: str = ""


Frames = Callable[[], AsyncIterator[Frame]]


def top(
    url: Annotated[str, URL] = "http://127.0.0.1:9300",
    once: Annotated[bool, typer.Option("--once", help="print it once and leave")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, a line for each snapshot")] = False,
    page: Annotated[str | None, typer.Option(help="HOST:PORT: show an engine as a page there")] = None,
    drain: Annotated[int | None, typer.Option(help="send nothing more to this engine of a router")] = None,
    undrain: Annotated[int | None, typer.Option(help="send to this engine again")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask before --drain and --undrain")] = False,
) -> None:
    """Show a router or an engine live: load, promises, errors.

    Of a router: give the address of --admin; opened in a browser, it is the same as a page. Of one engine
    (vLLM with or without the plug-in, or the emulator): give its own address; rates come from its /metrics.

    Examples:
      headgate top  # the router on this machine, http://127.0.0.1:9300
      headgate top http://gpu-a:8000
      headgate top http://gpu-a:8000 --page 127.0.0.1:9301
      headgate top --once --json
      headgate top --drain 1
    """
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    if drain is not None and undrain is not None:
        raise InputError("--drain and --undrain: give one of them")
    if (engine := undrain if drain is None else drain) is not None:
        asyncio.run(_drain(url, engine, "undrain" if drain is None else "drain", yes))
    elif once or as_json or page or sys.stdout.isatty():
        asyncio.run(_top(url, once, as_json, page))
    else:
        raise InputError("standard output is no terminal; give --once or --json")


async def _top(url: str, once: bool, as_json: bool, page: str | None) -> None:
    from headgate.live.tasks import until_stopped

    async with _session() as session:
        engine = await _engine_at(session, url)
        of_router = partial(_of_router, session, url)
        frames = of_router if engine is None else partial(_of_engine, session, url, engine)
        if page is not None:
            if engine is None:
                raise InputError(f"{url} is a router, which has this page itself: open it in a browser")
            work = _serve(frames, engine, url, page)
        else:
            work = _print(frames, once, as_json) if once or as_json else _show(frames, url)
        tasks = [asyncio.create_task(work), asyncio.create_task(until_stopped())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await tasks[0]


async def _show(frames: Frames, url: str) -> None:
    with Live(screen=True, auto_refresh=False) as live:
        async for frame in follow(frames):
            live.update(view(frame, url), refresh=True)


async def _print(frames: Frames, once: bool, as_json: bool) -> None:
    async for frame in follow(frames):
        if frame.lost:
            print(f"headgate top: {frame.lost}", file=sys.stderr)
        elif as_json:
            print(json.dumps(frame.shown), flush=True)
        else:
            Console(width=None if sys.stdout.isatty() else WIDE).print(view(frame))
        if once:
            return


async def _serve(frames: Frames, engine: EngineView, url: str, page: str) -> None:
    from aiohttp import web

    from headgate.live.route.config import address
    from headgate.live.route.view.feed import Feed, only_own_page
    from headgate.live.tasks import listen

    try:
        host, port = address(page)
    except ValueError as error:
        raise InputError(f"--page: {error}") from None
    feed = Feed(engine.history, lambda: engine.snapshot(engine.at))
    application = web.Application(middlewares=[only_own_page(page)])
    application.on_shutdown.append(feed.close)
    application.router.add_get("/", feed.page)
    application.router.add_get("/events", feed.events)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    try:
        port = await listen(runner, host, port)
        print(f"headgate top: {url} is shown on http://{host}:{port}/", flush=True)
        async for frame in follow(frames):
            engine.lost = frame.lost
    finally:
        await runner.cleanup()


async def _drain(url: str, engine: int, act: str, yes: bool) -> None:
    async with _session() as session:
        if await _engine_at(session, url) is not None:
            raise InputError(f"{url} is an engine; give the address of its router's --admin")
        shown = (await anext(_of_router(session, url))).shown
        found = [each for each in shown["engines"] if each["id"] == engine]
        if not found:
            raise InputError(f"the router has no engine {engine}; see headgate top {url}")
        about = f"{_clean(found[0]['url'])}, which has {found[0]['ours']} requests"
        yes or typer.confirm(f"{act} engine {engine} ({about})?", abort=True)
        async with session.post(f"{url}/admin/engines/{engine}/{act}") as answer:
            if answer.status != 200:
                raise InputError(f"the router refused it: {_clean(await answer.text())}")
            print(f"engine {engine}: {_clean((await answer.json())['status'])}")


# -- where it comes from


def _session() -> aiohttp.ClientSession:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=10.0)
    return aiohttp.ClientSession(timeout=timeout, read_bufsize=LARGEST)


async def _engine_at(session: aiohttp.ClientSession, url: str) -> EngineView | None:
    import aiohttp

    from headgate.live.route.view.counters import EngineView
    from headgate.live.tasks import why

    try:
        async with session.get(f"{url}/events") as answer:
            if answer.status == 503 and answer.content_type == "application/json":
                raise InputError(f"{url}: {_clean((await answer.json()).get('error'))}")
            if answer.status == 200 and answer.content_type == "text/event-stream":
                return None
            is_front = answer.headers.get("Server") == "headgate"
        text = "" if is_front else await _metrics(session, url)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise InputError(f"{url} cannot be reached: {_clean(why(error))}; check the address") from None
    if is_front:
        raise InputError(f"{url} serves a router's clients; give the address of its --admin (port 9300)")
    if not EngineView.knows(text):
        raise InputError(f"{url} is neither a router's admin address nor an engine; check the address")
    return EngineView(url)


async def follow(frames: Frames) -> AsyncIterator[Frame]:
    """What is there, for ever; a connection that is lost is made again."""
    import aiohttp

    frame = Frame({}, [])
    while True:
        try:
            async for frame in frames():
                yield frame
        except InputError:
            raise
        except (aiohttp.ClientError, OSError, ValueError, KeyError):
            pass
        if frame.shown:
            yield frame._replace(lost=LOST)
        await asyncio.sleep(RETRY)


async def _of_router(session: aiohttp.ClientSession, url: str) -> AsyncIterator[Frame]:
    event, history = "", []
    async with session.get(f"{url}/events") as answer:
        answer.raise_for_status()
        async for line in answer.content:
            word, _, data = line.decode(errors="replace").strip().partition(": ")
            if word == "event":
                event = data
            elif word == "data" and event == "history":
                history = json.loads(data)["rows"]
            elif word == "data":
                shown = json.loads(data)
                if shown["headgate"] != 1:
                    raise InputError(f"{url} has another version of the view; update headgate")
                if shown["point"] and (not history or shown["point"][0] > history[-1][0]):
                    history = [*history, shown["point"]][-POINTS:]
                yield Frame(shown, history)


async def _of_engine(session: aiohttp.ClientSession, url: str, engine: EngineView) -> AsyncIterator[Frame]:
    while True:
        engine.read(await _metrics(session, url), asyncio.get_running_loop().time())
        shown = engine.snapshot(engine.at)
        if shown["over_s"][0] > 0:  # rates need two looks
            yield Frame(shown, engine.history()["rows"])
        await asyncio.sleep(EVERY)


async def _metrics(session: aiohttp.ClientSession, url: str) -> str:
    from headgate.live.tasks import read_bounded

    async with session.get(f"{url}/metrics", allow_redirects=False) as answer:
        if answer.status != 200:
            raise ValueError(f"its /metrics answers {answer.status}")
        body = await read_bounded(answer.content, LARGEST)
    if len(body) > LARGEST:
        raise ValueError("its /metrics is too long")
    return body.decode(errors="replace")


# -- the view

SIGNS = {"busy": "▲", "half-open": "▲", "ejected": "▲", "draining": "◇", "retired": "◇", "unknown": "◇"}
SIGNS |= dict.fromkeys(("up", "idle", "mixed", "decode", "prefill"), "●")
STYLES = {"●": "cyan", "▲": "yellow", "◇": "dim", "■": "bold red"}
BLOCKS = " ▁▂▃▄▅▆▇█"
LANES = {"served/s": 1, "refused/s": 2, "failed/s": 3, "tokens/s": 4, "waiting": 6, "TTFT p95": 7}
LEFT = ("state", "breaker", "faults", "role", "URL", "kept", "why")  # columns of words
LONG = ("faults", "why")  # that may take several lines
WITH_URLS = 100  # columns of a terminal from which on URLs are shown
FEWEST, WIDEST, MOST_ROWS = 3, 60, 6  # points and bars of the timeline, tenants and errors


def view(frame: Frame, where: str = "", notes: Sequence[str] = ()) -> Group:
    shown = frame.shown
    many = f", {len(shown['engines']) + shown['left_out']['engines']} engines" * (shown["kind"] == "router")
    head = Text(f"{_clean(shown['kind'])} {_clean(shown['name'])}{many}", "bold")
    now = strftime("%H:%M:%S", localtime(shown["time"]))
    head.append(f"  {where}  {now}  ", "dim").append(frame.lost, "bold red")
    parts = [head, _totals(shown["totals"]), *(Text(_clean(note), "bold red") for note in shown["notes"])]
    parts += [Text(note) for note in notes]
    plan = shown.get("plan")
    errors = []
    for row in sorted(shown.get("errors", []), key=lambda row: row["outcome"] == "refused")[:MOST_ROWS]:
        style = "yellow" if row["outcome"] == "refused" else "bold red"
        what = Text(f"{_clean(row['outcome'])} {_clean(row['fault'])}", style)
        whose = {name: _clean(row[name] or "") for name in ("id", "status", "class", "tenant")}
        errors.append({"time": strftime("%H:%M:%S", localtime(row["time"])), "what": what, **whose})
    about = f"; plan {plan['age_s']:.0f} s old, earns {_number(plan['revenue'])}/s" if plan else ""
    tables = [
        _table("engines", [_engine(row) for row in shown["engines"]]),
        _table(f"classes, a second{about}", [_class(row) for row in shown["classes"]]),
        _table("tenants, a second", [_tenant(row) for row in shown["tenants"][:MOST_ROWS]]),
        *_lanes(frame.history),
        _table("last errors", errors, headed=False),
        _table("policy", [{_clean(k): _number(v, 3) for k, v in (shown.get("policy") or {}).items()}]),
    ]
    return Group(*parts, *(table for table in tables if table is not None))


def _totals(totals: Row) -> Text:
    text, loud = Text(), {"refused": "yellow", "failed": "bold red"}
    for name in ("served", "refused", "failed", "output", "running", "waiting"):
        value, word = totals.get(name), {"output": "tokens"}.get(name, name)
        text.append(f"{_number(value)} ", loud.get(name, "bold") if value else "bold")
        text.append(f"{word}{'/s' * (name not in ('running', 'waiting'))}   ", "dim")
    text.rstrip()
    text.append("\n")
    for name, word in (("ttft", "TTFT"), ("gap", "gap")):
        if f"{name}_p50" in totals:
            text.append(f"{word} ", "dim").append(_seconds(totals[f"{name}_p50"]), "bold")
            text.append(f" p95 {_seconds(totals[f'{name}_p95'])}   ", "dim")
    if totals.get("kept") is not None:
        text.append(_percent(totals["kept"]), "bold").append(" of promises kept", "dim")
    return text


def _engine(row: Row) -> Row:
    status, breaker = _clean(row["status"]), _clean(row.get("breaker", "closed"))
    if breaker != "closed" and row.get("retry_s"):
        breaker += f", {row['retry_s']:.0f} s"
    sign = SIGNS.get(status, "■")
    return {
        "engine": _clean(row["id"]),
        "state": Text(f"{sign} {status}", STYLES[sign]),
        "running": _number(row["running"], 0) + (f" of {_number(row['slots'], 0)}" if row["slots"] else ""),
        "waiting": _number(row["waiting"], 0),
        "ours": f"{_number(row['ours'], 0)} of {_number(row['lease'], 0)}" if "lease" in row else "",
        "KV": _percent(row["kv"]),
        "tokens/s": _number(row["output"], 0),
        "TTFT": _seconds(row["ttft"]),
        "breaker": "" if breaker == "closed" else breaker,
        "faults": _counts(row.get("faults")),
        "role": _clean(row["role"]).replace("any", ""),
        **({"URL": _clean(row["url"])} if Console().width >= WITH_URLS else {}),
    }


def _class(row: Row) -> Row:
    plan, kept = row.get("plan"), row["kept"]
    return {
        "class": _clean(row["name"]),
        "served": _rate(row, "served"),
        "plan": f"{_number(plan['served'])} of {_number(plan['rate'])}" if plan else "",
        "price": _number(plan["worth"]) if plan else "",
        "refused": _rate(row, "refused", "yellow"),
        "failed": _rate(row, "failed", "bold red"),
        "waiting": _number(row["waiting"], 0),
        "TTFT": _seconds(row.get("ttft_p50")),
        "p95": _seconds(row.get("ttft_p95")),
        "kept": ", ".join(f"{f'{_clean(k)} ' * (len(kept) > 1)}{_percent(v)}" for k, v in kept.items()),
        "why": _counts(row["why"]),
    }


def _tenant(row: Row) -> Row:
    return {
        "tenant": _clean(row["name"])[:32],
        "tokens": _rate(row, "tokens"),
        "requests": _rate(row, "requests"),
        "refused": _rate(row, "refused", "yellow"),
        "failed": _rate(row, "failed", "bold red"),
        "kept": _percent(row.get("kept")),
        "why": _counts(row.get("why")),
    }


def _lanes(history: list[list[float | None]]) -> Iterator[Text]:
    for name, column in LANES.items():
        values = [row[column] or 0.0 for row in history[-WIDEST:]]
        most = max(values, default=0.0)
        if len(values) >= FEWEST and most > 0:
            bars = "".join(BLOCKS[max(round(8 * value / most), value > 0)] for value in values)
            least = f"  at most {(_seconds if name.startswith('TTFT') else _number)(most)}"
            yield Text(f"{name:<10}", "dim").append(bars, "cyan").append(least, "dim")


def _table(title: str, rows: list[Row], headed: bool = True) -> Table | None:
    names = [name for name in rows[0] if any(str(row[name]) not in ("", "-") for row in rows)] if rows else []
    if not names:
        return None
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=headed)
    table.pad_edge, table.collapse_padding = False, True
    for place, name in enumerate(names):
        left = place == 0 or name in LEFT or not headed
        justify: Any = "left" if left else "right"
        table.add_column(name, justify=justify, no_wrap=name not in LONG, header_style="dim")
    for row in rows:
        table.add_row(*(cell if isinstance(cell := row[name], Text) else Text(cell) for name in names))
    return table


def _clean(text: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:200])


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits if abs(value) < 100 and value % 1 else 0}f}"


def _rate(row: Row, name: str, style: str = "") -> Text:
    value = row.get(name)
    return Text("" if value is None else _number(value, 2 if value < 1 else 1), style if value else "")


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _counts(reasons: dict[str, int] | None) -> str:
    return ", ".join(f"{_clean(reason)} {many}" for reason, many in (reasons or {}).items())


# -- headgate route

FRONT, POLICY = "Front", "Router"
ROUTER = "NAME, NAME:PARAMETER=VALUE,... or FILE.py:Class (default: least-loaded)"


def route(
    engine: Annotated[list[str] | None, typer.Option(help="URL of an engine; repeat it")] = None,
    config: Annotated[str | None, typer.Option(help="TOML file; flags are laid over it")] = None,
    router: Annotated[str | None, _option(ROUTER, POLICY)] = None,
    card: Annotated[str | None, _option("cost card of the engines, for routers that plan", POLICY)] = None,
    slots: Annotated[int | None, _option("requests at once of every --engine (256)", POLICY)] = None,
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
    """Route requests to several vLLM servers; OpenAI-compatible.

    With any of headgate's routers. Streams pass byte for byte. Requests wait in the router, not in the
    engines; failed calls are tried elsewhere before the first token; hang-ups reach the engine. Metrics,
    books and drain are on the address of --admin.

    Examples:
      headgate route --engine http://a:8000 --engine http://b:8000
      headgate route --engine http://a:8000 --engine http://b:8000 --router power-of-two --port 9000
      headgate route --config fleet.toml --check
      headgate route --config fleet.toml --router density-deep --card cal-h200-qwen3-8b
      headgate route --engine http://a:8000 --engine http://b:8000 --router split:prefill=1
      headgate route --new-key alice  # a key, and its line for the key file
      headgate route --demo  # four emulated engines, a load and a live view
    """
    from headgate.live.route.config import read_config

    if new_key is not None:
        from headgate.live.route import classes

        key, line = classes.new_key(new_key)
        print(f"key for the client (shown once): {key}\nline for the key file:           {line}")
        return
    logging.basicConfig(format="headgate route: %(message)s", level=logging.WARNING)
    fronts = {
        "host": host, "port": port, "admin": admin, "key_file": key_file, "access_log": access_log,
        "trace": trace, "open": open or None, "processes": processes,
    }  # fmt: skip
    flags = {"front": _given(fronts), "router": _given({"name": router, "card": card})}
    if store is not None:
        flags["replicas"] = {"store": store}
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
        _check_config(read())
        return
    from headgate.live.route.run import serve

    serve(read(), read, config, lambda line: print(f"headgate route: {line}", flush=True))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_config(config: Config) -> None:
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
    open_to_all = "none, every client that reaches the address is served"
    print(f"keys: {'required' if keys.required else open_to_all}")


async def _demo(flags: dict[str, dict[str, Any]], seconds: float | None) -> None:
    from headgate.live.route.run import demo
    from headgate.live.tasks import on_stop

    console, stop = Console(), asyncio.Event()
    on_stop(stop.set)
    async with demo(flags) as shown:
        load = asyncio.create_task(shown.run())
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, stop.set)
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
