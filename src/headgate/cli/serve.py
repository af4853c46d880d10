"""`headgate serve`: `vllm serve` with our scheduler plugged in; everything else is passed through."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from shlex import join, quote
from typing import Annotated, Any

import typer

from headgate.cli.flags import takes_settings
from headgate.core.errors import InputError
from headgate.live.engine.settings import AUTO, PANEL, Settings, check_words, merge
from headgate.live.vllm import VLLM
from headgate.live.vllm.settings import ADDITIONAL_CONFIG, VllmSettings, own_table, read_settings

SCHEDULER = "headgate.vllm.scheduler"
REFUSALS = "headgate.live.vllm.refusals.Refusals"
CONFIG, SHARED = "HEADGATE_CONFIG", "PROMETHEUS_MULTIPROC_DIR"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LIMITS = ("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len")
TENSOR = ("--tensor-parallel-size", "-tp")
ON, OFF = "--async-scheduling", "--no-async-scheduling"
PASSES = {"allow_extra_args": True, "ignore_unknown_options": True}  # what click calls it


EXAMPLES = """Run `vllm serve MODEL` with a headgate policy.

Options that are not ours go to vLLM untouched. vLLM's own --config goes behind --: headgate serve MODEL
--policy mixed -- --config vllm.yaml

\b
Examples:
  headgate serve Qwen/Qwen3-8B --card cal-h200-qwen3-8b --ttft 500ms --tbt 100ms
  headgate serve Qwen/Qwen3-8B --policy eb+ --card cal-h200-qwen3-8b --max-num-seqs 512
  headgate serve Qwen/Qwen3-8B --policy eb --set refill=48 --trace steps.jsonl --port 8001
  headgate serve Qwen/Qwen3-8B --config headgate.toml --tensor-parallel-size 2
"""


FILE = "all of these from a JSON or TOML file, read again when it changes"
DRY_RUN = "print the command and its environment, and leave"


@takes_settings
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="the model, as `vllm serve` takes it")],
    given: Annotated[dict[str, Any], VllmSettings],
    config: Annotated[str | None, typer.Option(help=FILE, rich_help_panel=PANEL)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN, rich_help_panel=PANEL)] = False,
) -> None:
    """Check the settings, and let vLLM serve."""
    raise typer.Exit(_run(model, list(context.args), given, config, dry_run))


def _run(model: str, rest: list[str], given: dict[str, Any], config: str | None, dry_run: bool) -> int:
    """Check everything, then hand over to vLLM; its exit code."""
    if model.startswith("-"):
        raise InputError(f"the model comes first, not {model}; write headgate serve MODEL {model} ...")
    if _value(rest, "--scheduler-cls") is not None:
        raise InputError("--scheduler-cls is what headgate serve sets; drop it or run vllm serve yourself")
    own = _own_file(config, given)
    settings, given = _settings(own, given, rest), Settings.renamed(given)
    _check_model(model, settings, rest)
    vllm = executable()
    if vllm is None and not dry_run:
        raise InputError("no vllm command here; install vLLM (0.26 to 0.33) into the environment of headgate")
    _check_release(settings)
    command = [vllm or "vllm", "serve", model, *rest, "--scheduler-cls", SCHEDULER]
    if settings.refuse:
        command += ["--middleware", REFUSALS]
    with ExitStack() as scratch:
        folder = Path(tempfile.gettempdir(), "headgate-XXXX")
        if not dry_run:
            folder = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="headgate-")))
        environment = _environment(settings, own, given, folder, dry_run)
        shown = " ".join(f"{name}={quote(value)}" for name, value in environment.items())
        lines = [f"{_policy_said(settings, model)}; {_limits_said(rest)}"]
        by_priority = _value(rest, "--scheduling-policy") == "priority"
        priorities = settings.priorities_said(VLLM.priorities) if by_priority else None
        lines += filter(None, (_graphs_said(settings, rest), priorities))
        for line in lines:
            print(f"headgate: {line}", file=sys.stdout if dry_run else sys.stderr)
        print(f"headgate: {shown} {join(command)}", flush=True)
        if dry_run and own is None:
            print(f"headgate: {environment[CONFIG]} would say {json.dumps(given)}")
        return 0 if dry_run else _wait(command, {**os.environ, **environment}, folder)


def _own_file(config: str | None, given: Mapping[str, Any]) -> str | None:
    """The file of settings the user keeps; then nothing may be said beside it."""
    inherited = os.environ.get(CONFIG)
    if config is not None and inherited:
        raise InputError(f"--config {config}, but {CONFIG} is set to {inherited}; unset it or drop --config")
    own = config if config is not None else inherited or None
    if own is not None and given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise InputError(
            f"{flag} beside the settings file {own}; write it into the file or drop one of the two"
        )
    return own


def _settings(own: str | None, given: dict[str, Any], rest: list[str]) -> Settings:
    """Checked as the engine will check them, as far as that can be told before it is there."""
    from headgate.live.engine.policy import check_policy

    additional = _additional(rest)
    if own:
        settings = read_settings(additional, own)
    else:
        settings = merge(check_words(given, ""), own_table(additional), ADDITIONAL_CONFIG)
    check_policy(settings, VLLM, _number(rest, "--max-num-batched-tokens"), _number(rest, "--max-num-seqs"))
    return settings


def _check_model(model: str, settings: Settings, rest: list[str]) -> None:
    """A card of another model or number of GPUs, as far as the command tells; the engine compares both later.

    What a file of vLLM's own settings says is left to the engine.
    """
    from headgate.cost.card import differ
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
    if differ(model, card.model):
        raise InputError(
            f"card {card.name} is of another model ({card.model}), not of {model}; calibrate "
            f"(headgate calibrate {model}), drop --card, or give --any-card"
        )


def _policy_said(settings: Settings, model: str) -> str:
    """The policy that will run and whose step times it uses, in one line."""
    if settings.policy == VLLM.name:
        return "vLLM decides; headgate watches"
    name, values = settings.named()
    chosen = f"policy {name}{' (auto)' if settings.policy == AUTO else ''}"
    chosen += f" with {', '.join(f'{key}={value}' for key, value in values.items())}" if values else ""
    from headgate.live.engine.policy import load_named

    if (card := load_named(settings.card)) is not None:
        return f"{chosen}, step times of card {card.name} ({card.model} on {card.gpu})"
    learned = "learns step times while it serves" if settings.learns() else "needs no step times"
    return f"{chosen}, no card: it {learned}; headgate calibrate {model} measures them"


def _limits_said(rest: list[str]) -> str:
    """Slots, budget, longest request and asynchrony: as the command line says, or as vLLM decides."""
    parts = [f"{flag[2:]} {_value(rest, flag) or 'as vLLM chooses'}" for flag in LIMITS]
    named = next((flag for flag in (OFF, ON) if flag in (word.replace("_", "-") for word in rest)), None)
    ahead = {OFF: "synchronous", ON: "asynchronous"}.get(named or "", "asynchronous where vLLM can")
    return ", ".join([*parts, f"scheduling {ahead}"])


def _graphs_said(settings: Settings, rest: list[str]) -> str:
    """What would help a promise between tokens, unless the command line says how graphs are captured."""
    if not (settings.tbt or any(each.tbt for each in settings.classes.values())):
        return ""
    from headgate.advisor.flags import FLAG, LARGEST, graph_flag

    own = {FLAG, "--compilation-config", "-O", "--cudagraph-capture-sizes", "--enforce-eager"}
    if own & {word.partition("=")[0].replace("_", "-") for word in rest}:
        return ""
    size = graph_flag(_number(rest, "--max-num-batched-tokens") or LARGEST).value
    return f"fewer gaps are late with {FLAG} {size} (docs/vllm.md)"


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


def _additional(rest: list[str]) -> Any:
    """VLLM's --additional-config; if it is no JSON vLLM will say so itself."""
    try:
        return json.loads(_value(rest, ADDITIONAL_CONFIG) or "null")
    except ValueError:
        return None


def executable() -> str | None:
    """VLLM's command: beside this Python, where headgate is installed too, or on the path."""
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.is_file() else shutil.which("vllm")


def _check_release(settings: Settings) -> None:
    from headgate.live.vllm.seams import installed, release_numbers, unsupported

    found = installed()
    why = unsupported(release_numbers(found)) if found else None
    if why and not settings.force:
        raise InputError(why)


def _environment(
    settings: Settings, own: str | None, given: dict[str, Any], folder: Path, dry_run: bool
) -> dict[str, str]:
    """What vLLM's processes inherit beside our own environment; the folder goes again at the end."""
    file = folder / "headgate.json"
    if own is None and not dry_run:
        file.write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
    environment = {CONFIG: str(file) if own is None else os.path.abspath(own)}
    if settings.metrics and SHARED not in os.environ:
        shared = folder / "metrics"
        if not dry_run:
            shared.mkdir()
        environment[SHARED] = str(shared)
    return environment


def _wait(command: list[str], environment: dict[str, str], folder: Path) -> int:
    """Run it in a group of its own and pass signals on: one Ctrl-C reaches vLLM once, not twice."""
    reaper = Reaper(str(folder))
    early: list[int] = []  # signals that came before there was a process to pass them to
    before = {number: signal.signal(number, lambda got, frame: early.append(got)) for number in PASSED_ON}
    try:
        child = subprocess.Popen(command, env=environment, process_group=0)
        reaper.watch(child.pid)
        for number in PASSED_ON:
            signal.signal(number, lambda got, frame: child.send_signal(got))
        for got in early:
            child.send_signal(got)
        code = child.wait()
    except OSError as error:
        raise InputError(f"cannot run {command[0]}: {error.strerror}; install vLLM again") from None
    finally:
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
        ours, theirs = os.pipe()
        self._pipe = theirs
        try:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                ["/bin/sh", "-c", WATCH, "headgate-reaper", folder, str(grace)],
                stdin=ours,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # signals of the terminal do not reach it
            )
        except OSError:
            self._child = None
        os.close(ours)

    def watch(self, group: int) -> None:
        """This process group ends with us."""
        self._say(str(group))

    def close(self) -> None:
        self._say("done")
        os.close(self._pipe)
        if self._child is not None:
            self._child.wait()

    def _say(self, line: str) -> None:
        with suppress(OSError):  # it was ended from outside: then nothing is watched
            os.write(self._pipe, f"{line}\n".encode())


serve.__doc__ = EXAMPLES
serve.context = PASSES  # type: ignore[attr-defined]
