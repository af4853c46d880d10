"""`headgate check`: the laws of policies and routers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from textwrap import fill
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.flags import named_values
from headgate.cli.help import Texts
from headgate.cli.output import Json, bar, write_json
from headgate.core.errors import InputError, RunError
from headgate.methods.make import policy_class, router_class, split_name

if TYPE_CHECKING:
    from headgate_leaderboard.laws import LawTrial

INDENT = " " * 13


def check(
    policy: Annotated[
        str, typer.Argument(help="of a policy or router: FILE.py:CLASS, or NAME:PARAMETER=VALUE,...")
    ],
    set: Annotated[Texts, typer.Option(help="a parameter of the policy, NAME=VALUE")] = None,
    worlds: Annotated[int, typer.Option(help="how many worlds", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="number of the first world", min=0)] = 0,
    seconds: Annotated[float, typer.Option(help="give up when one world takes longer", min=0.1)] = 30,
    json: Json = None,
) -> None:
    """Test whether a policy or router of your own keeps the laws.

    Runs it in many small random worlds. The laws of policies: every request is served, every plan makes
    sense; the same history gives the same plans; asking twice changes nothing; leases are honest; an engine
    that gives less breaks nothing; it can take over half-way. The laws of routers: every move makes sense and
    every request is served or leaves; the same history gives the same moves. Exit code 1 when one is broken.
    In pytest: headgate_leaderboard.laws.try_laws and headgate_leaderboard.laws.try_router_laws.

    Examples:
      headgate check my_policy.py:MyPolicy
      headgate check eb:refill=2 --worlds 500
      headgate check my_router.py:MyRouter
      headgate check my_policy.py:MyPolicy --seed 17 --worlds 1
    """
    from headgate_leaderboard.laws import try_laws, try_router_laws

    name, settings = split_name(policy)
    settings = {**named_values(set or []), **settings}
    what = "router" if _is_router(name) else "policy"
    limit = time_limit(seconds, f"{what} {policy}: one world", "mend a loop without end, or raise --seconds")
    with bar(policy, worlds) as progress, limit as again:

        def tried(done: int) -> None:
            again()
            progress(done)

        try_all = try_router_laws if what == "router" else try_laws
        trial = try_all(name, settings, worlds, seed, tried)
    trial.policy = policy
    document = {name: value for name, value in asdict(trial).items() if name != "policy"}
    write_json(json, {what: policy, **document, "kept": trial.kept})
    if json != "-":
        _print_trial(trial)
    if not trial.kept:
        raise typer.Exit(1)


def _is_router(name: str) -> bool:
    for is_one, find in ((False, policy_class), (True, router_class)):
        try:
            find(name)
            return is_one
        except InputError:
            continue
    return False  # neither: what is wrong is said of the policy


def _print_trial(trial: LawTrial) -> None:
    for verdict in trial.verdicts:
        word = "BROKEN" if verdict.broken else "kept" if trial.keeps(verdict) else "-"
        print(f"{verdict.law:12} {word:7} {verdict.says}")
        if verdict.broken:
            said = f"in {verdict.broken} of {verdict.worlds} worlds; {verdict.first}"
            print(fill(said, 80, initial_indent=INDENT, subsequent_indent=INDENT))
    kept = sum(map(trial.keeps, trial.verdicts))
    tried = trial.worlds - trial.refused
    print(f"{trial.policy}: {kept} of {len(trial.verdicts)} laws kept in {tried} worlds")
    first, *others = trial.verdicts
    if first.broken:
        print(f"note: -: not told, the other laws were tried in {others[0].worlds} of {tried} worlds only")
    if trial.refused:
        print(f"note: its parameters do not fit the engines of {trial.refused} more worlds")


# -- an end to code that does not end by itself


class _TooLongError(BaseException):
    """No Exception, so that it passes whatever catches the errors of a policy."""


@contextmanager
def time_limit(seconds: float, what: str, remedy: str) -> Iterator[Callable[[], None]]:
    """A RunError with the place it was at when `seconds` pass; calling what it gives starts the time anew.

    Where there are no alarms (Windows, threads) there is no limit.
    """
    alarms = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()

    def again() -> None:
        if alarms:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def ring(number: int, frame: FrameType | None) -> None:
        at = f", last seen in {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
        raise _TooLongError(f"{what} takes longer than {seconds:g} s{at}; {remedy}")

    before = signal.signal(signal.SIGALRM, ring) if alarms else None
    again()
    try:
        yield again
    except _TooLongError as error:
        raise RunError(str(error)) from None
    finally:
        if alarms:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
