"""The commands. `main` turns every mistake of the user into one line and exit code 2."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import typer

from headgate.cli.advise import advise
from headgate.cli.calibrate import EXAMPLES as CALIBRATE
from headgate.cli.calibrate import calibrate
from headgate.cli.card import card
from headgate.cli.check import check
from headgate.cli.compare import compare
from headgate.cli.demo import demo
from headgate.cli.doctor import doctor
from headgate.cli.emulate import emulate
from headgate.cli.help import Application
from headgate.cli.plan import plan
from headgate.cli.report import report
from headgate.cli.reproduce import reproduce
from headgate.cli.route import route
from headgate.cli.serve import PASSES, serve
from headgate.cli.simulate import simulate
from headgate.cli.sweep import sweep
from headgate.cli.trace import trace
from headgate.core.errors import InputError, RunError, RunInterruptedError
from headgate.core.version import VERSION

NO_COLOR = "--no-color"
INTERRUPTED = 130  # exit code, as shells have it

# Typer brings its own copy of click from some version on; this is the base of all usage errors in either.
UsageFault = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = Application(
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


app.command()(demo)
app.command()(advise)
app.command()(simulate)
app.command()(compare)
app.command()(check)
app.command()(doctor)
app.command()(reproduce)
app.add_typer(plan, name="plan")
app.add_typer(card, name="card")
app.command(context_settings=PASSES)(serve)
app.command()(emulate)
app.command()(trace)
app.command()(route)
app.command(help=CALIBRATE)(calibrate)
app.command()(report)
app.command()(sweep)


def main() -> None:
    """Exit codes: 0 done, 1 the run failed, 2 the input was wrong."""
    _replace_closed_streams()
    _take_colours_off()
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
        if not isinstance(error, UsageFault):
            raise
        code = _refuse(error)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(error: Any) -> int:
    """A wrong command line, or a group without a command, which shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 2
    path = str(getattr(getattr(error, "ctx", None), "command_path", None) or "headgate")
    return _say(f"{error.format_message().rstrip('.')}; see {path} --help", 2)


def _replace_closed_streams() -> None:
    """Python has no stream where the shell closed one; printing to nowhere is what was asked for."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _take_colours_off() -> None:
    """`--no-color` may stand anywhere before a bare --; whatever prints looks at NO_COLOR."""
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
    with suppress(OSError):  # nobody can be told that standard error is full
        print(f"headgate: {' '.join(message.split())}", file=sys.stderr)
    return code
