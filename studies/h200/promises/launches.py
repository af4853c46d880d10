"""How long the host took to launch steps: `python -m studies.h200.promises.launches STEM...`.

STEM names a file of results/promises, `h200-e` for instance, that `--watch` wrote. It holds launches of more
than 12 ms, so the quantiles of groups whose launches are quick are too high. A stall is a launch of more
than 70 ms. The ramp ends with the last launch that had more requests than any before it.
"""

from __future__ import annotations

import gzip
import json
import sys

import numpy as np

from studies.h200.promises.stalls import RESULTS, show
from studies.h200.promises.table import Line

ENDING = ".launches.jsonl.gz"
MOST = (512, 1024, 2048, 4096, 8192)  # tokens
STALL = 0.07  # seconds
HEAD = ("file", "tokens", "launches", "median (ms)", "p90", "p99", "worst", "stalls in the ramp", "after it")


def rows(stem: str) -> list[tuple[str, ...]]:
    """One for each range of tokens."""
    with gzip.open(RESULTS / f"{stem}{ENDING}", "rt", encoding="utf-8") as file:
        launches: list[Line] = [json.loads(text) for text in file]
    ramp = max(each["at"] for each in launches if "record" in each)
    found = []
    for least, most in zip((0, *MOST), MOST, strict=False):
        here = [each for each in launches if least < each["tokens"] <= most]
        host = 1000 * np.array([each["execute"] + each["sample"] for each in here])
        stalls = [each["at"] for each, took in zip(here, host, strict=True) if took > 1000 * STALL]
        late = sum(at > ramp for at in stalls)
        shown = [f"{value:.0f}" for value in np.quantile(host, (0.5, 0.9, 0.99, 1.0))]
        counts = (str(len(stalls) - late), str(late))
        found.append((stem, f"{least + 1:,} to {most:,}", f"{len(here):,}", *shown, *counts))
    return found


if __name__ == "__main__":
    show(sys.argv[1:], ENDING, HEAD, rows)
