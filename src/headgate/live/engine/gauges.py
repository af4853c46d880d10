"""A policy's own numbers, as far as they are numbers: a policy is the user's code and may show anything."""

from __future__ import annotations

from collections.abc import Mapping

LONGEST_NAME = 64  # characters
MOST = 256  # gauges of one policy


def numbers(gauges: object) -> dict[str, float]:
    """The gauges that can be shown, by name; what is no number is left out."""
    if not isinstance(gauges, Mapping):
        return {}
    found: dict[str, float] = {}
    for name, value in list(gauges.items())[:MOST]:
        try:
            found[str(name)[:LONGEST_NAME]] = float(value)
        except Exception:  # float() of the user's own type may raise anything
            continue
    return found
