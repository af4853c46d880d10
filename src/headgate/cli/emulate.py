"""`headgate emulate`: an OpenAI-compatible vLLM or SGLang that needs no GPU."""

from __future__ import annotations

import importlib
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headgate.cli.flags import takes_settings
from headgate.core.errors import InputError, RunError
from headgate.cost.card import renamed
from headgate.live.emulate.options import SERVER, Options
from headgate.settings_base import checked

EXAMPLES = """Answer as a loaded vLLM or SGLang server would, without a GPU.

Steps take as long as a card says, and the scheduling policy is the real one. Serves /v1/completions,
/v1/chat/completions, /v1/models, /tokenize, /health, /metrics and more, as vLLM 0.32 does; with --engine
sglang /generate, SGLang's metrics and its scheduling, too.

\b
Examples:
  headgate emulate --card cal-h200-qwen3-8b --policy eb+ --slots 512
  headgate emulate --engine sglang --port 30000
  headgate emulate --engines 4 --port 8001 --speed 2.0
  headgate emulate --engines 4 --ranks --port 8001
  headgate emulate --fail-rate 0.05 --fault drop=20
  headgate emulate --output-law geometric --output 300
  headgate emulate --speed 2.0 --out served
"""
PROCESSES = typer.Option(help="share the engines between so many processes", rich_help_panel=SERVER)


@takes_settings
def emulate(given: Annotated[dict[str, Any], Options], processes: Annotated[int, PROCESSES] = 1) -> None:
    """Check the settings and serve."""
    options = checked(Options, given)
    _check(options)
    if processes < 1:
        raise InputError(f"--processes {processes}; give at least 1")
    if processes > 1:
        raise typer.Exit(_several(options, processes))
    _serve(options)


def _check(options: Options) -> None:
    """As far as that can be done without listening."""
    try:
        importlib.import_module("headgate.live.emulate.server")
    except ImportError as error:
        raise InputError(
            f"emulate needs package {error.name}; pip install headgate, in a clone pip install ."
        ) from None
    from headgate.live.emulate.faults import read_fault
    from headgate.live.emulate.service import EmulatorSetup

    EmulatorSetup(options)
    if line := renamed(options.card):
        _say(line)
    read_fault(options.fault)


def _serve(options: Options) -> None:
    from headgate.live.emulate.server import run

    logging.basicConfig(format="headgate: %(message)s", level=logging.WARNING)
    run(options, _say)
    if options.out is not None:
        _keep(options, options.out)


def _keep(options: Options, out: str) -> None:
    """A run folder beside each trace, as other commands write it."""
    from headgate.cli.output import save
    from headgate.live.emulate.metrics import files
    from headgate.record.live_trace import read_live_trace

    for number, path in files(out, options.engines):
        try:
            run = read_live_trace(path)
        except InputError as error:
            _say(f"no run folder: {error}")
            continue
        if options.engines > 1:
            run.meta["label"] = f"{run.meta['label']}, engine {number}"
        folder = path.with_suffix("")
        save(run, folder, False)
        _say(f"run folder: {folder}")


def _say(line: str) -> None:
    """In one write: several processes may share the terminal."""
    sys.stdout.write(f"headgate emulate: {line}\n")
    sys.stdout.flush()


def _several(options: Options, processes: int) -> int:
    """Each process gets its share of the ports; a signal to us is a signal to all."""
    if not options.port or options.ranks or options.engines < processes:
        raise InputError(
            f"--processes {processes} needs a fixed --port and at least {processes} --engines on ports of "
            "their own; give both or drop it"
        )
    if options.out is not None:
        from headgate.live.emulate.metrics import open_folder

        open_folder(options.out)
    children, first = [], 0
    for number in range(processes):
        share = options.engines // processes + (number < options.engines % processes)
        command = [sys.executable, "-c", "from headgate.cli import main; main()", *sys.argv[1:]]
        command += ["--processes", "1", "--engines", str(share), "--port", str(options.port + first)]
        if options.admin_port:
            command += ["--admin-port", str(options.admin_port + number)]
        if options.out is not None:
            command += ["--out", str(Path(options.out, f"process-{number}"))]
        children.append(subprocess.Popen(command))
        first += share

    def pass_on(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, lambda number, frame: None)  # the terminal tells the children itself
    codes = [child.wait() for child in children]
    if any(codes):
        raise RunError(f"a process of the emulator ended with {next(filter(None, codes))}")
    return 0


emulate.__doc__ = EXAMPLES
