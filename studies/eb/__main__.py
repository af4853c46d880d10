"""Run studies of EB: `python -m studies.eb [--quick] [online] [hybrid] [memory] [gap] [loops]`.

Prints Markdown tables and writes the same, with more columns, as CSV under studies/eb/results;
--quick runs less and writes nothing.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module

STUDIES = ("online", "hybrid", "memory", "gap", "loops")


def main(words: list[str]) -> None:
    quick = "--quick" in words
    names = [word for word in words if word != "--quick"] or list(STUDIES)
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        sys.exit(f"unknown study {unknown[0]!r}; choose from: {', '.join(STUDIES)}")
    for name in names:
        began = time.perf_counter()
        import_module(f"studies.eb.{name}").main(quick)
        print(f"\n({name}: {time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
