"""The time of the most expensive requests we know: `python -m benchmarks.client_input`.

The law is 1 ms of the engine's thread for any single request. Tests count calls and bytes; this prints time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import thread_time_ns
from typing import Any

from headgate.live.engine.requests import promises
from headgate.live.engine.settings import CLIENTS_MAY, Promise, Settings

LIMIT = 1000.0  # microseconds
LARGE = 1 << 25
TRIES = 20
OPEN = Settings(
    clients_may=CLIENTS_MAY, classes={f"class {number}": Promise(tbt=0.05) for number in range(1000)}
)
CASES: Mapping[str, Mapping[str, Any]] = {
    "no parameters": {},
    "a class": {"headgate_class": "class 7"},
    "all four": {
        "headgate_class": "class 7",
        "headgate_ttft": "500ms",
        "headgate_tbt": "50ms",
        "headgate_guess": 80,
    },
    "15,000 digits and no unit": {"headgate_ttft": "1" * 15_000 + "!"},
    "32 MB of digits": {"headgate_tbt": "1" * LARGE},
    "32 MB of spaces": {"headgate_tbt": "1" + " " * LARGE + "!"},
    "a number of 5,000 digits": {"headgate_guess": 10**5000},
    "20,000 unknown parameters": {f"headgate_{number}": 1 for number in range(20_000)},
    "an unknown name of 5 MB": {"headgate_" + "x" * 5_000_000: 1},
    "an unknown class": {"headgate_class": "x" * 64},
    "a list of 4 million": {"headgate_class": [1.5] * (1 << 22), "headgate_guess": [1.5] * (1 << 22)},
}


def microseconds(arguments: Mapping[str, Any]) -> float:
    """Of the slowest of a few tries; the first, which logs, is left out."""
    promises(arguments, OPEN)
    slowest = 0
    for _ in range(TRIES):
        began = thread_time_ns()
        promises(arguments, OPEN)
        slowest = max(slowest, thread_time_ns() - began)
    return slowest / 1000


def main() -> int:
    """Print the table; exit code 1 where a case is above the limit."""
    print("| request | slowest of 20, us |\n|---|---|")
    worst = 0.0
    for name, arguments in CASES.items():
        found = microseconds(arguments)
        worst = max(worst, found)
        print(f"| {name} | {found:,.1f} |")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
