"""How many of a fleet's engines should do prompts only, when the others do outputs only (DistServe)."""

from __future__ import annotations

from headgate.core.errors import InputError


def split_rate(engines: int, prefill: int, prompt_seconds: float, output_seconds: float) -> float:
    """Requests per second that the split sustains: the smaller of r_P/T_P and r_D/T_D (arXiv 2508.01002)."""
    rates = [
        pool / seconds
        for pool, seconds in ((prefill, prompt_seconds), (engines - prefill, output_seconds))
        if seconds > 0
    ]
    return min(rates)


def best_split(engines: int, prompt_seconds: float, output_seconds: float) -> int:
    """The number of prefill engines with the highest rate; of equals the fewest.

    `prompt_seconds` is what one request's prompt takes of a prefill engine, `output_seconds` what its output
    takes of a decode engine whose steps are full.
    """
    if engines < 2:
        raise InputError(f"{engines} engine cannot be split into prefill and decode; give at least 2")
    if prompt_seconds <= 0 and output_seconds <= 0:
        raise InputError("neither prompts nor outputs take any time; the split of the engines is undefined")
    rates = [split_rate(engines, number, prompt_seconds, output_seconds) for number in range(1, engines)]
    return 1 + rates.index(max(rates))
