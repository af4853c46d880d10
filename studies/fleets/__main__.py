"""Run studies of routers: `python -m studies.fleets [--quick] [STUDY ...]`; names stand in STUDIES.

Prints Markdown tables and keeps every run as a line of JSON under studies/fleets/results, so that an
interrupted study goes on where it stopped; --quick runs a fiftieth and keeps nothing.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module

STUDIES = ("sizes", "levels", "tokens", "causes", "combined", "online", "home", "speed")


def main(words: list[str]) -> None:
    quick = "--quick" in words
    names = [word for word in words if word != "--quick"] or list(STUDIES)
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        sys.exit(f"unknown study {unknown[0]!r}; choose from: {', '.join(STUDIES)}")
    for name in names:
        began = time.perf_counter()
        import_module(f"studies.fleets.{name}").main(quick)
        print(f"\n({name}: {time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
