"""Promises kept against the rate: `python -m studies.h200.promises.curve [--out FILE.svg] FILE...`.

FILEs are results.jsonl of `python -m studies.h200.promises`, of several machines and days: one panel for each
workload of NAMES, one line for each arm through the means over runs, bars from the worst run to the best.
Only runs with the newest delivery and graphs of 4,096 tokens count; a request that was not served to its end
is late.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from studies.cards.plots import COLOURS, Panel, Point, Series, svg

ARMS = {
    "plain": "vLLM",
    "mixed:budget=2560": "vLLM, static budget 2,560",
    "keep": "headgate with a card",
    "auto": "headgate, no tuning",
}
COLOUR = dict(zip(("plain", "mixed:budget=2560", "auto", "keep"), COLOURS, strict=False))
NAMES = {"azure-conv": "Azure conversations", "azure-code": "Azure code", "sharegpt-8k": "ShareGPT"}
GRAPH, DELIVERY = 4096, "20ms"
Runs = dict[tuple[str, str, float], list[float]]  # workload, arm, rate: shares kept


def read(files: list[Path]) -> Runs:
    """The runs that may stand in one picture."""
    found: Runs = defaultdict(list)
    for file in files:
        comparable = False
        for text in file.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if setup := line.get("setup"):
                comparable = setup["graph"] == GRAPH and setup.get("delivery") == DELIVERY
            elif comparable and line["arm"] in ARMS and line["rate"] and line["kept"] is not None:
                found[line["workload"], line["arm"], line["rate"]].append(100 * line["kept"])
    return found


def panel(workload: str, runs: Runs) -> Panel:
    """One workload."""
    series = []
    for arm, label in ARMS.items():
        points: list[Point] = []
        for rate in sorted({key[2] for key in runs if key[:2] == (workload, arm)}):
            shares = runs[workload, arm, rate]
            points.append(Point(rate, fmean(shares), min(shares), max(shares), len(shares)))
        if points:
            series.append(Series(label, tuple(points), COLOUR[arm], strong=arm == "auto"))
    axes = f"{NAMES[workload]}, requests/s", "% of requests"
    return Panel(*axes, tuple(series), "runs")


def main() -> None:
    """Print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, help="where the SVG goes")
    parser.add_argument("--lowest", type=float, default=0.0, help="draw no lower rates; the table has them")
    asked = parser.parse_args()
    runs = read(asked.files)
    print("| workload | requests/s |", " | ".join(ARMS.values()), "|")
    print("|---|---|" + "---|" * len(ARMS))
    for workload, rate in sorted({(key[0], key[2]) for key in runs}):
        cells = [runs.get((workload, arm, rate), []) for arm in ARMS]
        print(f"| {workload} | {rate:g} |", " | ".join(map(shown, cells)), "|")
    if asked.out and runs:
        runs = {key: shares for key, shares in runs.items() if key[2] >= asked.lowest}
        drawn = [name for name in NAMES if any(key[0] == name for key in runs)]
        title = "Both promises kept on one H200: first token within 500 ms, no gap above 100 ms"
        asked.out.write_text(svg(title, [panel(each, runs) for each in drawn]), encoding="utf-8")


def shown(shares: list[float]) -> str:
    """Every run, so that the spread is seen."""
    return ", ".join(f"{share:.0f}" for share in sorted(shares)) or "-"


if __name__ == "__main__":
    main()
