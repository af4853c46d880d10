"""Servers: `headgate emulate`, and what others' routers and autoscalers ask, `predict` and `watch`."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headgate.cli.flags import takes_settings
from headgate.core.errors import InputError, RunError
from headgate.live.emulate.options import SERVER, Options, PredictOptions
from headgate.live.scaling import WatchOptions
from headgate.settings_base import checked

PROCESSES = typer.Option(help="share the engines between so many processes", rich_help_panel=SERVER)


@takes_settings
def emulate(given: Annotated[dict[str, Any], Options], processes: Annotated[int, PROCESSES] = 1) -> None:
    """Answer as a loaded vLLM or SGLang server would, without a GPU.

    Steps take as long as a card says, and the scheduling policy is the real one. Serves /v1/completions,
    /v1/chat/completions, /v1/models, /tokenize, /health, /metrics and more, as vLLM 0.32 does; with --engine
    sglang /generate, SGLang's metrics and its scheduling, too.

    Examples:
      headgate emulate --card cal-h200-qwen3-8b --policy eb+ --slots 512
      headgate emulate --engine sglang --port 30000
      headgate emulate --engines 4 --port 8001 --speed 2.0
      headgate emulate --engines 4 --ranks --port 8001
      headgate emulate --fail-rate 0.05 --fault drop=20
      headgate emulate --output-law geometric --output 300
      headgate emulate --speed 2.0 --out served
    """
    from headgate.live.emulate.faults import read_fault
    from headgate.live.emulate.server import run
    from headgate.live.emulate.service import EmulatorSetup

    options = checked(Options, given)
    EmulatorSetup(options)  # mistakes are told before anything listens
    read_fault(options.fault)
    if processes < 1:
        raise InputError(f"--processes {processes}; give at least 1")
    if processes > 1:
        _several(options, processes)
        return
    logging.basicConfig(format="headgate: %(message)s", level=logging.WARNING)
    run(options, _say)
    if options.out is not None:
        _keep(options, options.out)


def _keep(options: Options, out: str) -> None:
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


def _several(options: Options, processes: int) -> None:
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


# -- what other people's routers and autoscalers ask


@takes_settings
def predict(options: PredictOptions) -> None:
    """Predict TTFT and TPOT for llm-d's router from a card.

    Drop-in for llm-d's latency predictor: point PREDICTION_SERVER_URL and TRAINING_SERVER_URL of its router
    here. Answers from the first call on, and corrects itself by what the router measures. See
    docs/kubernetes.md.

    Examples:
      headgate predict --card cal-h200-qwen3-8b
      headgate predict --card my-card.json --slots 512 --budget 16384 --host 0.0.0.0 --port 8001
      headgate predict --policy keep --tbt 100ms --output 400
    """
    from headgate.live.predict import run

    run(options, lambda line: print(f"headgate predict: {line}", flush=True))


@takes_settings
def watch(options: WatchOptions) -> None:
    """Say how many engines a fleet needs, for an autoscaler.

    For fleets without headgate's router, which says the same. Reads the metrics of vLLM or SGLang engines and
    serves headgate_engines_needed{model,pool} on /metrics, for KEDA or a HorizontalPodAutoscaler. See
    docs/kubernetes.md.

    Examples:
      headgate watch --engine http://a:8000 --engine http://b:8000 --card cal-h200-qwen3-8b
      headgate watch --prometheus http://prometheus:9090 --autoscale plan:ceiling=40,start=3min
    """
    from headgate.live.watch import run

    run(options, lambda line: print(f"headgate watch: {line}", flush=True))
