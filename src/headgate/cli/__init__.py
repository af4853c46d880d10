"""The commands. `main` turns every mistake of the user into one line and exit code 2."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import typer

from headgate.cli.help import PLUGGED_IN, Application, GroupPage, built, plugged_in
from headgate.core.errors import InputError, RunError, RunInterruptedError
from headgate.core.version import VERSION

NO_COLOR = "--no-color"
INTERRUPTED = 130  # exit code, as shells have it

# Typer brings its own copy of click from some version on; this is the base of all usage errors in either.
UsageFault: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

# What `headgate --help` says of each. A command's module is imported when it runs.
COMMANDS = {
    "demo": "What scheduling is worth on one GPU; runs without a GPU.",
    "advise": "Say which policy, flags and engines keep your latency promises.",
    "simulate": "Serve a workload under one policy, in virtual time.",
    "compare": "Serve the same requests under several policies, side by side.",
    "check": "Test whether a policy or router of your own keeps the laws.",
    "doctor": "Say what is installed and what would run in vLLM and SGLang.",
    "reproduce": "Run a published experiment; print published and our numbers.",
    "serve": "Run `vllm serve` or `sglang serve` with a headgate policy.",
    "warm-up": "Load a server that has just started, before users come.",
    "emulate": "Answer as a loaded vLLM or SGLang server would, without a GPU.",
    "trial": "Compare policies on a running server, by turns.",
    "trace": "Read the step trace of a live engine and say what happened.",
    "route": "Route requests to several vLLM servers; OpenAI-compatible.",
    "predict": "Predict TTFT and TPOT for llm-d's router from a card.",
    "watch": "Say how many engines a fleet needs, for an autoscaler.",
    "top": "Show a router or an engine live: load, promises, errors.",
    "calibrate": "Measure how long steps take on your GPU and write a cost card.",
    "report": "Show runs in one HTML file that needs nothing but a browser.",
    "sweep": "Run a grid of settings, policies and seeds on all cores.",
    "leaderboard": "Compare policies by several promises, with the bound.",
    "plan": "Plan thresholds, flags of vLLM or SGLang, capacity and fleets.",
    "card": "Derive a cost card without measuring; list and show cards.",
}


# A command's module has its name, but for these.
HOMES = {"advise": "plan", "calibrate": "card", "trace": "report", "top": "route"}
HOMES |= {"warm-up": "serve", "predict": "emulate", "watch": "emulate"}
HOMES |= dict.fromkeys(("compare", "sweep"), "simulate")


@cache
def command_of(name: str) -> Any:
    if name in PLUGGED_IN:
        return plugged_in(name)
    module = import_module(f"headgate.cli.{HOMES.get(name, name)}")
    return built(getattr(module, name.replace("-", "_")))


class Commands(GroupPage):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names, for suggestions

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command_of(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = Application(
    Commands,
    help="headgate decides when the prefill and decode work of an LLM run on a GPU.",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Print the version and leave.", is_eager=True),
    no_color: bool = typer.Option(
        False, "--no-color", help="No colours; may stand anywhere. So does NO_COLOR."
    ),
) -> None:
    """Decide when prefill and decode run."""
    if show:
        print(f"headgate {VERSION}")
        raise typer.Exit()


def main() -> None:
    """Exit codes: 0 done, 1 the run failed, 2 the input was wrong."""
    _prepare()
    try:
        code = app(prog_name="headgate", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # newer releases of typer make this of an interrupt, without a word
            _say("interrupted", INTERRUPTED)
    except InputError as error:
        code = _say(str(error), 2)
    except RunError as error:
        code = _say(str(error), INTERRUPTED if isinstance(error, RunInterruptedError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        code = _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        code = _give_up_output(141)
    except MemoryError:
        code = _say("not enough memory for this run; ask for fewer requests", 1)
    except OSError as error:  # whatever files the commands read and write, they answer for themselves
        code = _give_up_output(_say(f"cannot write the output: {error.strerror}; send it elsewhere", 1))
    except Exception as error:
        code = _other(error)
    sys.exit(code if isinstance(code, int) else 0)


def _other(error: Any) -> int:
    """A package that is not there, as in make demo's environment, or a wrong command line; else a defect."""
    if isinstance(error, ModuleNotFoundError) and not (error.name or "headgate").startswith("headgate"):
        package = str(error.name).partition(".")[0]
        needs = f"this command needs package {package}"
        return _say(f"{needs}; pip install headgate (in a clone: pip install .) brings it", 2)
    if not isinstance(error, UsageFault):
        raise error
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command shows its help
        try:
            print(error.format_message(), flush=True)
        except BrokenPipeError:
            return _give_up_output(141)
        return 2
    path = str(getattr(getattr(error, "ctx", None), "command_path", None) or "headgate")
    return _say(f"{error.format_message().rstrip('.')}; see {path} --help", 2)


def _prepare() -> None:
    """Python has no stream where the shell closed one; printing to nowhere is what was asked for.

    `--no-color` may stand anywhere before a bare --; whatever prints looks at NO_COLOR.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    own = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    if NO_COLOR in own[1:]:
        sys.argv.remove(NO_COLOR)
        os.environ["NO_COLOR"] = "1"


def _give_up_output(code: int) -> int:
    """What is still to be printed goes nowhere; Python would try again, and complain, when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _say(message: str, code: int) -> int:
    with suppress(OSError):  # standard error is full: there is no other place to say it
        print(f"headgate: {' '.join(message.split())}", file=sys.stderr)
    return code
