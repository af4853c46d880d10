"""`headgate serve`: `vllm serve` or `sglang serve` with our scheduler; all else is passed through."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from http.client import HTTPException
from itertools import chain
from math import inf
from pathlib import Path
from shlex import join, quote
from typing import Annotated, Any, NamedTuple

import typer

from headgate.cli.flags import takes_settings
from headgate.core.durations import duration
from headgate.core.errors import InputError
from headgate.live.engine.process import EngineNames
from headgate.live.engine.settings import AUTO, PANEL, Settings, check_words, merge, where_is
from headgate.live.sglang import LOADED, SGLANG
from headgate.live.sglang.fit import MIXED_CHUNK, arguments, check_arguments, check_fit, mixes
from headgate.live.vllm import VLLM
from headgate.live.vllm.refusals import OURS, WARM_FILE
from headgate.live.vllm.settings import ADDITIONAL_CONFIG, own_table, read_settings
from headgate.settings_base import BETWEEN

SCHEDULER = "headgate.vllm.scheduler"
REFUSALS, WARMING = (f"headgate.live.vllm.refusals.{name}" for name in ("Refusals", "Warming"))
CONFIG, SHARED = "HEADGATE_CONFIG", "PROMETHEUS_MULTIPROC_DIR"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LIMITS = ("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len")
TENSOR = ("--tensor-parallel-size", "-tp")
# Then it is not known where the server is, or it is not plain HTTP.
ELSEWHERE = ("--config", "--uds", "--ssl-keyfile", "--ssl-certfile", "--headless")
ON, OFF = "--async-scheduling", "--no-async-scheduling"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # past any proxy
PASSES = {"allow_extra_args": True, "ignore_unknown_options": True}  # what click calls it


FILE = "all of these from a JSON or TOML file, read again when it changes"
DRY_RUN = "print the command and its environment, and leave"
GRAPHS = "capture larger CUDA graphs where a gap is promised"
WARM = "send load before /health says ready, where anything is promised"
ENGINE = "vllm or sglang"


@takes_settings
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="the model, as `vllm serve` takes it")],
    given: Annotated[dict[str, Any], Settings],
    engine: Annotated[str, typer.Option(help=ENGINE, rich_help_panel=PANEL)] = VLLM.name,
    config: Annotated[str | None, typer.Option(help=FILE, rich_help_panel=PANEL)] = None,
    graphs: Annotated[bool, typer.Option(help=GRAPHS, rich_help_panel=PANEL)] = True,
    warm: Annotated[bool, typer.Option("--warm-up/--no-warm-up", help=WARM, rich_help_panel=PANEL)] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN, rich_help_panel=PANEL)] = False,
) -> None:
    """Run `vllm serve` or `sglang serve` with a headgate policy.

    Options that are not ours go to the engine untouched. vLLM's own --config goes behind --: headgate serve
    MODEL --policy mixed -- --config vllm.yaml

    Examples:
      headgate serve Qwen/Qwen3-8B --ttft 500ms --tbt 100ms
      headgate serve Qwen/Qwen3-8B --policy eb+ --card cal-h200-qwen3-8b --max-num-seqs 512
      headgate serve Qwen/Qwen3-8B --policy eb --set refill=48 --trace steps.jsonl --port 8001
      headgate serve Qwen/Qwen3-8B --config headgate.toml --tensor-parallel-size 2
      headgate serve Qwen/Qwen3-8B --engine sglang --policy eb --set refill=48
    """
    if engine not in (VLLM.name, SGLANG.name):
        raise InputError(f"--engine {engine} is not known; write vllm or sglang")
    if model.startswith("-"):
        raise InputError(f"the model comes first, not {model}; write headgate serve MODEL {model} ...")
    ours = [option for each in context.command.params for option in each.opts]
    for word in context.args:
        flag = word.partition("=")[0]
        near = get_close_matches(flag.lower(), ours, n=1, cutoff=0.8) if flag.startswith("--") else []
        near = ["--ttft and --tbt"] if flag == "--slo" else near
        if near and flag not in ours:  # behind -- stand the engine's own
            said = f"headgate: {flag} is not ours and goes to {engine}; did you mean {near[0]}?"
            print(said, file=sys.stdout if dry_run else sys.stderr)  # where the other lines go
    call = Call(model, list(context.args), given, _own_file(config, given), dry_run)
    raise typer.Exit(_run_sglang(call) if engine == SGLANG.name else _run(call, graphs, warm))


class Call(NamedTuple):
    model: str
    rest: list[str]  # for the engine
    given: dict[str, Any]  # for us
    own: str | None  # file of our settings
    dry_run: bool


def _run(call: Call, graphs: bool, warm: bool) -> int:
    from headgate.live.vllm.seams import RELEASES, installed

    model, rest = call.model, call.rest
    if _value(rest, "--scheduler-cls") is not None:
        raise InputError("--scheduler-cls is what headgate serve sets; drop it or run vllm serve yourself")
    settings = _settings(call)
    _check_model(model, settings, rest)
    vllm = executable()
    if vllm is None and not call.dry_run:
        raise InputError("no vllm command here; install vLLM (0.26 to 0.33) into the environment of headgate")
    if (why := RELEASES.problem(installed() or "")) and not settings.force:
        raise InputError(why)
    more, graphs_said = _graphs(settings, rest) if graphs else ([], "")
    watch, warm_said = _warm_up(settings, rest) if warm else (None, "")
    command = [vllm or "vllm", "serve", model, *more, *rest, "--scheduler-cls", SCHEDULER]
    if settings.refuse:
        command += ["--middleware", REFUSALS]
    if watch is not None:
        command += ["--middleware", WARMING]
    by_priority = _value(rest, "--scheduling-policy") == "priority"
    priorities = settings.priorities_said(VLLM.priorities) if by_priority else None
    limits = [f"{flag[2:]} {_value(rest, flag) or 'as vLLM chooses'}" for flag in LIMITS]
    named = next((flag for flag in (OFF, ON) if flag in (word.replace("_", "-") for word in rest)), "")
    ahead = {OFF: "synchronous", ON: "asynchronous"}.get(named, "asynchronous where vLLM can")
    chosen = f"{_policy_said(settings, model, VLLM)}; {', '.join(limits)}, scheduling {ahead}"
    lines = (chosen, _classes_said(settings), _unpromised(settings), graphs_said, warm_said, priorities)
    return _launch(call, command, lines, settings, VLLM, watch)


class Watch(NamedTuple):
    """A thread beside the engine, and the variable that tells the engine the file they share."""

    variable: str
    file: str
    work: Callable[[subprocess.Popen[bytes], Path, threading.Event], None]  # until the event


def _launch(
    call: Call,
    command: list[str],
    lines: Sequence[str | None],
    settings: Settings,
    engine: EngineNames,
    watch: Watch | None,
) -> int:
    given, own, dry_run = Settings.renamed(call.given), call.own, call.dry_run
    with ExitStack() as scratch:
        folder = Path(tempfile.gettempdir(), "headgate-XXXX")
        if not dry_run:
            folder = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="headgate-")))
            (folder / "metrics").mkdir()
            (folder / "headgate.json").write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
        environment = {CONFIG: str(folder / "headgate.json") if own is None else os.path.abspath(own)}
        if settings.metrics and SHARED not in os.environ and engine is VLLM:  # SGLang makes its own
            environment[SHARED] = str(folder / "metrics")
        if watch is not None:
            environment[watch.variable] = str(folder / watch.file)
        for line in filter(None, lines):
            print(f"headgate: {line}", file=sys.stdout if dry_run else sys.stderr)
        shown = " ".join(f"{name}={quote(value)}" for name, value in environment.items())
        print(f"headgate: {shown} {join(_without_keys(command))}", flush=True)
        if dry_run and own is None:
            print(f"headgate: {environment[CONFIG]} would say {json.dumps(given)}")
        return 0 if dry_run else _wait(command, {**os.environ, **environment}, folder, engine, watch)


def _own_file(config: str | None, given: Mapping[str, Any]) -> str | None:
    inherited = os.environ.get(CONFIG) or None
    if config is not None and inherited:
        raise InputError(f"--config {config}, but {CONFIG} is set to {inherited}; unset it or drop --config")
    own = inherited if config is None else config
    if own is not None and given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise InputError(
            f"{flag} beside the settings file {own}; write it into the file or drop one of the two"
        )
    return own


def _settings(call: Call) -> Settings:
    from headgate.live.engine.policy import check_policy

    rest = call.rest
    try:
        additional = json.loads(_value(rest, ADDITIONAL_CONFIG) or "null")
    except ValueError:  # vLLM will say so itself
        additional = None
    if call.own:
        settings = read_settings(additional, call.own)
    else:
        settings = merge(check_words(call.given, ""), own_table(additional), ADDITIONAL_CONFIG)
    limits = _number(rest, "--max-num-batched-tokens"), _number(rest, "--max-num-seqs")
    check_policy(settings, VLLM, *limits, where_is(call.own))
    return settings


# -- SGLang

SGLANG_LIMITS = ("--max-running-requests", "--chunked-prefill-size", "--context-length")
PLUGINS = "SGLANG_PLUGINS"


def _run_sglang(call: Call) -> int:
    model, rest, settings = call.model, call.rest, _sglang_settings(call)
    command = executable(SGLANG.name)
    if command is None and not call.dry_run:
        raise InputError("no sglang command here; install SGLang into the environment of headgate")
    mixing = settings.policy != SGLANG.name and mixes(settings.named()[0])
    wanted = {MIXED_CHUNK: mixing, "--enable-metrics": settings.metrics}
    more = [flag for flag, needed in wanted.items() if needed and flag not in rest]
    limits = ", ".join(f"{flag[2:]} {_value(rest, flag) or 'as SGLang chooses'}" for flag in SGLANG_LIMITS)
    chosen = f"{_policy_said(settings, model, SGLANG)}; {limits}"
    lines = (chosen, _classes_said(settings), _unpromised(settings))
    url, missing = _where(rest, port="30000"), threading.Event()

    def stop_without_us(child: subprocess.Popen[bytes], file: Path, ended: threading.Event) -> None:
        """Ends a server that answers although our scheduler has not said its first word."""
        while not ended.wait(1.0) and not file.exists():
            try:
                with DIRECT.open(f"{url}/health", timeout=5) as answer:
                    up = answer.status == 200
            except (OSError, HTTPException):
                continue
            if up and not file.exists():
                missing.set()
                child.send_signal(signal.SIGTERM)
                return

    words = [command or SGLANG.name, "serve", model, *more, *rest]
    watch = Watch(LOADED, "loaded", stop_without_us)
    code = _launch(call, words, lines, settings, SGLANG, watch)
    if missing.is_set():
        raise InputError("SGLang had started without headgate, and was stopped; its log says why")
    return code


def _sglang_settings(call: Call) -> Settings:
    from headgate.live.engine import settings as neutral
    from headgate.live.engine.policy import check_policy
    from headgate.live.sglang.seams import home, problem

    check_arguments(arguments(call.rest))
    chosen = [name.strip() for name in os.environ.get(PLUGINS, "").split(",") if name.strip()]
    if chosen and "headgate" not in chosen:
        raise InputError(f"{PLUGINS} names other plug-ins only; add headgate to it or unset it")
    settings = neutral.read_settings(call.own) if call.own else merge(check_words(call.given, ""), None, "")
    if settings.policy != SGLANG.name:
        check_fit(settings.named()[0], mixed_chunk=True)
    slots, budget, _ = SGLANG_LIMITS
    limits = _number(call.rest, budget), _number(call.rest, slots)
    check_policy(settings, SGLANG, *limits, where_is(call.own))
    if home() is not None and (why := problem()) and not settings.force:
        raise InputError(why)
    return settings


def _check_model(model: str, settings: Settings, rest: list[str]) -> None:
    """A card of another model or number of GPUs, as far as the command tells; the engine compares both later.

    What a file of vLLM's own settings says is left to the engine.
    """
    from headgate.cost.likeness import other_model
    from headgate.live.engine.policy import load_named

    card = load_named(settings.card)
    if card is None or settings.any_card:
        return
    shared = (card.provenance.settings or {}).get("tensor parallel", "")
    given = next((found for flag in TENSOR if (found := _value(rest, flag))), "1")
    if shared and shared != given and _value(rest, "--config") is None:
        raise InputError(
            f"card {card.name} is of tensor parallel {shared}, this engine would have {given}; give "
            f"{TENSOR[0]} {shared}, another card, or --any-card"
        )
    remedy = f"calibrate (headgate calibrate {model}), drop --card, or give --any-card"
    if why := other_model(card, model, remedy):
        raise InputError(why)


def _policy_said(settings: Settings, model: str, names: EngineNames) -> str:
    from headgate.live.engine.policy import load_named

    if settings.policy == names.name:
        return f"{names.title} decides; headgate watches"
    name, values = settings.named()
    chosen = f"policy {name}{' (auto)' if settings.policy == AUTO else ''}"
    chosen += f" with {', '.join(f'{key}={value}' for key, value in values.items())}" if values else ""
    if (card := load_named(settings.card)) is not None:
        return f"{chosen}, step times of card {card.name} ({card.model} on {card.gpu})"
    learned = "learns step times while it serves" if settings.learns() else "needs no step times"
    return f"{chosen}, no card: it {learned}; headgate calibrate {model} measures them"


def _classes_said(settings: Settings) -> str:
    def said(words: Any) -> str:
        limits = {name: getattr(words, name) for name in ("ttft", *BETWEEN)}
        parts = (f"{name} {1000 * value:g} ms" for name, value in limits.items() if value)
        return ", ".join(parts) or "nothing promised"

    classes = []
    for name, own in settings.classes.items():
        weight = "" if own.weight is None else f", weight {own.weight:g}"
        classes.append(f"{name}: {'background' if own.background else said(own)}{weight}")
    listed = "; ".join([*classes, f"without a class: {said(settings)}"])
    return f"classes: {listed}" if classes else ""


def _unpromised(settings: Settings) -> str:
    first = (settings.ttft, *(promise.ttft for promise in settings.classes.values()))
    if settings.tightest() < inf or any(first):
        return ""
    keep = "keep schedules as eb+, " if settings.named()[0] == "keep" else ""
    return f"nothing is promised (--ttft, --tbt): {keep}no promise is counted"


def _graphs(settings: Settings, rest: list[str]) -> tuple[list[str], str]:
    """Flags that a promise between tokens needs, and the line that says so, unless the command line says how
    graphs are captured.

    Beyond the graphs single launches took the host of an H200 100 ms, and every request waited.
    """
    if settings.tightest() == inf:
        return [], ""
    from headgate.advisor.flags import FLAG, LARGEST, MEMORY, graph_flags
    from headgate.cost.derive.derived_card import UTILISATION

    own = {FLAG, "--compilation-config", "-cc", "-O", "--cudagraph-capture-sizes", "--enforce-eager"}
    own.add("--config")  # it may name any of these
    named = {word.partition("=")[0].partition(".")[0].replace("_", "-") for word in rest}
    if own & named or any(word.startswith("-O") for word in rest):
        return [], ""
    added = graph_flags(_number(rest, "--max-num-batched-tokens") or LARGEST)
    if any(word.startswith(("--gpu-memory", "--kv-cache-memory")) for word in named):
        added.pop(MEMORY, None)
    memory = f" (vLLM: {UTILISATION:.2f})" if MEMORY in added else ""
    said = " and ".join(" ".join(flag) for flag in added.items()) + memory
    cost = "they take about half a minute more to start and 2 GiB"
    return [*chain(*added.items())], f"a gap is promised: {said}; {cost}; --no-graphs leaves both out"


def _warm_up(settings: Settings, rest: list[str]) -> tuple[Watch | None, str]:
    if _unpromised(settings):
        return None, ""
    url = _where(rest, port="8000")
    if any(word.partition("=")[0].replace("_", "-") in ELSEWHERE for word in rest):
        return None, "the first minute is slow: send load before users come, headgate warm-up URL"
    key = _value(rest, "--api-key") or os.environ.get("VLLM_API_KEY", "")
    most = min(_number(rest, "--max-num-seqs") or MOST_WARM, MOST_WARM)
    said = f"/health answers 503 until {url} is warm, at most {SECONDS_WARM:.0f} s (--no-warm-up)"

    def warm(child: subprocess.Popen[bytes], file: Path, ended: threading.Event) -> None:
        """Waits until vLLM is up, sends the load, and leaves the file that says so, whatever came of it."""
        try:
            if _is_up(url, file, ended):
                from headgate.live.warm_up import warm_up

                load = warm_up(url, most, SECONDS_WARM, key, _say)
                asyncio.run(asyncio.wait_for(load, SECONDS_WARM + GRACE))
        except (InputError, ImportError, TimeoutError) as error:
            _say(f"not warmed up: {error or 'the server does not answer'}")
        finally:
            with suppress(OSError):
                file.touch()

    return Watch(WARM_FILE, "warm", warm), said


def _is_up(url: str, file: Path, ended: threading.Event) -> bool:
    """Wait for our own server, past any proxy; False: vLLM has ended, or does not speak plain HTTP."""
    health = urllib.request.Request(f"{url}/health", headers={OURS.decode(): "1"})
    while not ended.wait(1.0):
        try:
            with DIRECT.open(health, timeout=5) as answer:
                if answer.headers.get(OURS.decode()) == str(file):
                    return True  # it is ours, not another server on this port
        except OSError:
            continue
        except HTTPException:
            _say(f"not warmed up: {url} does not speak plain HTTP")
            return False
    return False


def _where(rest: list[str], port: str) -> str:
    host, port = _value(rest, "--host") or "", _value(rest, "--port") or port
    host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}"


def _without_keys(command: list[str]) -> list[str]:
    shown, hide = [], False
    for word in command:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            hide = name.replace("_", "-") == "--api-key"
            shown.append(f"{name}=..." if hide and equals else word)
        else:
            shown.append("..." if hide else word)
    return shown


def _say(line: str) -> None:
    print(f"headgate: warm-up: {line}", file=sys.stderr, flush=True)


def _value(rest: list[str], flag: str) -> str | None:
    """What vLLM will be told with this flag, in either spelling; the last one counts."""
    found = None
    for place, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else rest[place + 1] if place + 1 < len(rest) else None
    return found


def _number(rest: list[str], flag: str) -> int | None:
    text = _value(rest, flag)
    return int(text) if text is not None and text.isdigit() and int(text) else None


def executable(name: str = "vllm") -> str | None:
    """The engine's command: beside this Python, where headgate is installed too, or on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


def _wait(
    command: list[str], environment: dict[str, str], folder: Path, engine: EngineNames, watch: Watch | None
) -> int:
    """Run it in a group of its own and pass signals on: one Ctrl-C reaches the engine once, not twice."""
    reaper, ended = Reaper(str(folder)), threading.Event()
    early: list[int] = []  # signals that came before there was a process to pass them to
    before = {number: signal.signal(number, lambda got, frame: early.append(got)) for number in PASSED_ON}
    try:
        child = subprocess.Popen(command, env=environment, process_group=0)
        reaper.say(str(child.pid))
        if watch is not None:
            work = child, folder / watch.file, ended
            threading.Thread(target=watch.work, args=work, name="headgate-watch", daemon=True).start()
        for number in PASSED_ON:
            signal.signal(number, lambda got, frame: child.send_signal(got))
        for got in early:
            child.send_signal(got)
        code = child.wait()
    except OSError as error:
        raise InputError(f"cannot run {command[0]}: {error.strerror}; install {engine.title} again") from None
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        reaper.close()
    return code if code >= 0 else 128 - code


# -- the end of vLLM when headgate is killed

GRACE = 60  # seconds vLLM has to end by itself
# Reads the group, then waits: a second line says that all is done, the end of the pipe that its writer died.
WATCH = """
read -r group
read -r finished && exit 0
if [ -n "$group" ]; then
    kill -TERM "-$group" 2>/dev/null
    waited=0
    while kill -0 "-$group" 2>/dev/null && [ "$waited" -lt "$2" ]; do sleep 1; waited=$((waited + 1)); done
    kill -KILL "-$group" 2>/dev/null
fi
rm -rf -- "$1"
"""


class Reaper:
    """A small shell that outlives this process, whatever happens to it; without a shell nothing watches."""

    def __init__(self, folder: str, grace: int = GRACE) -> None:
        ours, self._pipe = os.pipe()
        command, nowhere = ["/bin/sh", "-c", WATCH, "headgate-reaper", folder, str(grace)], subprocess.DEVNULL
        # signals of the terminal do not reach a session of its own
        how: dict[str, Any] = {"stdin": ours, "stdout": nowhere, "stderr": nowhere, "start_new_session": True}
        try:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(command, **how)
        except OSError:
            self._child = None
        os.close(ours)

    def say(self, line: str) -> None:
        with suppress(OSError):  # it was ended from outside: then nothing is watched
            os.write(self._pipe, f"{line}\n".encode())

    def close(self) -> None:
        self.say("done")
        os.close(self._pipe)
        if self._child is not None:
            self._child.wait()


# -- headgate warm-up

MOST_WARM, SECONDS_WARM = 448, 120.0
URL = "the server, such as http://localhost:8000"


def warm_up(
    url: Annotated[str, typer.Argument(help=URL)],
    most: Annotated[int, typer.Option(min=1, max=10_000, help="requests at once")] = MOST_WARM,
    seconds: Annotated[str, typer.Option(help="at most so long")] = "2min",
    api_key: Annotated[str, typer.Option(help="key that the server wants", envvar="VLLM_API_KEY")] = "",
) -> None:
    """Load a server that has just started, before users come.

    An engine compiles kernels in its first minute under load, and stalls each time a step holds more prompts
    than any before it. headgate serve does this by itself where anything is promised.

    Examples:
      headgate warm-up http://localhost:8000
      headgate warm-up http://10.0.0.7:8000 --most 256 --seconds 1min
    """
    from headgate.live.warm_up import warm_up as send

    limit = duration(seconds)
    if not 0 < limit < inf:
        raise InputError(f"--seconds {seconds}: write a time above 0, such as 2min")
    asyncio.run(send(url, most, limit, api_key, lambda line: print(f"warm-up: {line}", flush=True)))


serve.context = PASSES  # type: ignore[attr-defined]
