"""What was served: a step trace for each engine, written while it serves."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError
from headgate.core.version import VERSION
from headgate.live.emulate.clock import Clock
from headgate.live.emulate.made import Made
from headgate.live.engine.trace import Trace
from headgate.methods.make import split_name


def traces(made: Made, clock: Clock, engines: int) -> list[Trace]:
    """One for each engine, in the folder `out`; none without one."""
    out = made.options.out
    if out is None:
        return []
    open_folder(out)
    return [Trace(path, _header(made, clock, number)) for number, path in files(out, engines)]


def open_folder(out: str) -> None:
    """Refuse a folder that holds something, or that nobody can make."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"--out {out} is not empty; choose another folder")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror or error}; choose another folder") from None


def discard(kept: list[Trace]) -> None:
    """Nothing was served: leave no folder behind."""
    for trace in kept:
        trace.close()
        with suppress(OSError):
            trace.path.unlink()
            trace.path.parent.rmdir()


def files(out: str, engines: int) -> Iterator[tuple[int, Path]]:
    """Number and trace of each engine."""
    return ((number, Path(out, f"engine-{number}.jsonl")) for number in range(engines))


def _header(made: Made, clock: Clock, number: int) -> dict[str, Any]:
    """The first line of a trace. Its times are emulated ones, whatever the speed."""
    card, options = made.card, made.options
    return {
        "headgate": VERSION,
        "driver": "emulator",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "zero": clock.wall(0.0),  # the date, in Unix seconds, from which its times are counted
        "policy": split_name(options.policy)[0],
        "parameters": made.parameters,
        "card": card.name,
        "model": card.model,
        "gpu": card.gpu,
        "provenance": card.provenance.source,
        "engine": made.engine.limits,
        "asynchronous": options.asynchronous,
        "replica": number,
        "kv_tokens": made.engine.kv_tokens,
        "speed": None if options.virtual else options.speed,
        "versions": {"python": platform.python_version()},
    }
