"""`headgate emulate`: an OpenAI-compatible vLLM that needs no GPU."""

from __future__ import annotations

import importlib
import logging
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from headgate.core.errors import InputError, RunError

if TYPE_CHECKING:
    from headgate.live.emulate.options import Options

EXAMPLES = """Answer as a loaded vLLM would, without a GPU: step times of a card, the real scheduling policy.

Serves /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /health, /metrics and more, as vLLM 0.32
does. Needs the packages aiohttp, msgspec and prometheus-client (the extra `emulate`).

\b
Examples:
  headgate emulate --card cal-h200-qwen3-8b --policy eb+ --slots 512 --port 8001
  headgate emulate --engines 4 --port 8001 --speed 2.0            ports 8001 to 8004, twice as fast
  headgate emulate --engines 4 --ranks --port 8001                one port, four data-parallel ranks
  headgate emulate --fail-rate 0.05 --fault drop=20 --port 8001   5 % of the streams break after 20 tokens
  headgate emulate --output-law geometric --output 300 --port 8001
"""
ENGINE, SERVER, OUTPUT, FAULTS, KV = "Engine", "Server", "Answers", "Faults", "KV transfer"
Text: TypeAlias = str | None
Number: TypeAlias = int | None
Real: TypeAlias = float | None


def _option(help: str, panel: str, *flags: str) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel)


def emulate(
    card: Annotated[Text, _option("cost card: a name (see `headgate doctor`) or a file", ENGINE)] = None,
    policy: Annotated[Text, _option("NAME or NAME:PARAMETER=VALUE,... (default: mixed)", ENGINE)] = None,
    slots: Annotated[Number, _option("requests at once, vLLM's max_num_seqs (default: 256)", ENGINE)] = None,
    budget: Annotated[Number, _option("tokens in one step (default: 8192)", ENGINE)] = None,
    kv_tokens: Annotated[Number, _option("KV memory in tokens (default: the card's)", ENGINE)] = None,
    block: Annotated[Number, _option("KV tokens per block (default: the card's)", ENGINE)] = None,
    model_len: Annotated[Number, _option("most tokens of one request (default: the card's)", ENGINE)] = None,
    asynchronous: Annotated[
        bool, _option("compose a step while the one before runs, as vLLM", ENGINE)
    ] = False,
    host: Annotated[Text, _option("address to listen on (default: 127.0.0.1)", SERVER)] = None,
    port: Annotated[int, _option("first port; 0: any free one", SERVER)] = 8000,
    engines: Annotated[Number, _option("so many engines, on ports from --port on", SERVER)] = None,
    ranks: Annotated[bool, _option("all engines on one port, as data-parallel ranks", SERVER)] = False,
    processes: Annotated[int, _option("share the engines between so many processes", SERVER)] = 1,
    speed: Annotated[Real, _option("so many times faster than real time (default: 1)", SERVER)] = None,
    virtual: Annotated[bool, _option("virtual clock: answer at once, stamp virtual times", SERVER)] = False,
    hold: Annotated[Number, _option("with --virtual: begin when so many requests are there", SERVER)] = None,
    max_queued: Annotated[Number, _option("503 when so many wait, as --max-num-queued-reqs", SERVER)] = None,
    max_queued_tokens: Annotated[Number, _option("the same in prompt tokens", SERVER)] = None,
    max_requests: Annotated[Number, _option("503 beyond so many requests (default: 4096)", SERVER)] = None,
    max_connections: Annotated[Number, _option("503 beyond so many connections (10000)", SERVER)] = None,
    shutdown_timeout: Annotated[Real, _option("seconds to drain after SIGTERM (default: 30)", SERVER)] = None,
    admin_port: Annotated[Number, _option("port of the admin calls (default: none)", SERVER)] = None,
    admin_host: Annotated[Text, _option("its address (default: 127.0.0.1)", SERVER)] = None,
    model: Annotated[Text, _option("name of the model (default: the card's)", OUTPUT)] = None,
    tokenizer: Annotated[
        Text, _option("tokenizer.json or its folder (default: 4 bytes a token)", OUTPUT)
    ] = None,
    output: Annotated[Real, _option("mean output tokens where clients do not decide", OUTPUT)] = None,
    output_law: Annotated[
        Text, _option("fixed, uniform, geometric, gamma, lognormal, lengths=FILE", OUTPUT)
    ] = None,
    trace: Annotated[Text, _option("output lengths drawn from a trace, such as azure-conv", OUTPUT)] = None,
    echo: Annotated[bool, _option("answer with the prompt", OUTPUT)] = False,
    fail_rate: Annotated[Real, _option("this share of the requests gets --fault", FAULTS)] = None,
    fault: Annotated[Text, _option("503, drop=20, stall=5, ... (default: 500)", FAULTS)] = None,
    stall_at: Annotated[Number, _option("every stream stops after so many tokens", FAULTS)] = None,
    crash_after: Annotated[Number, _option("the engine dies after so many tokens", FAULTS)] = None,
    slow_start: Annotated[Real, _option("seconds before anybody listens", FAULTS)] = None,
    fault_header: Annotated[bool, _option("requests may name their fault (x-emulate-fault)", FAULTS)] = True,
    kv_lease: Annotated[Real, _option("emulated seconds KV is kept for another engine (30)", KV)] = None,
    kv_load_failure: Annotated[Text, _option("fail or recompute (default: fail)", KV)] = None,
    kv_hosts: Annotated[list[str] | None, _option("host from which KV may be read", KV, "--kv-host")] = None,
) -> None:
    """Check the settings and serve."""
    given = {name: value for name, value in locals().items() if value is not None and name != "processes"}
    given["kv_hosts"] = tuple(kv_hosts or ())
    options = _options(given)
    if processes < 1:
        raise InputError(f"--processes {processes}; give at least 1")
    if processes > 1:
        raise typer.Exit(_several(options, processes))
    _serve(options)


def _options(given: dict[str, Any]) -> Options:
    """Checked as far as that can be done without listening."""
    try:
        importlib.import_module("headgate.live.emulate.serve")
    except ImportError as error:
        raise InputError(
            f'the emulator needs the package {error.name}; pip install "headgate[emulate]"'
        ) from None
    from headgate.live.emulate.options import Made, Options

    options = Options(**given)
    Made(options)
    return options


def _serve(options: Options) -> None:
    from headgate.live.emulate.serve import run

    logging.basicConfig(format="headgate: %(message)s", level=logging.WARNING)
    run(options, _say)


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
    children, first = [], 0
    for number in range(processes):
        share = options.engines // processes + (number < options.engines % processes)
        command = [sys.executable, "-c", "from headgate.cli import main; main()", *sys.argv[1:]]
        command += ["--processes", "1", "--engines", str(share), "--port", str(options.port + first)]
        if options.admin_port:
            command += ["--admin-port", str(options.admin_port + number)]
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
