"""The markdown tables of one or more result files: `python -m studies.h200.table RESULTS.jsonl...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from studies.h200.arms import PLAIN
from studies.h200.loads import SEED, load

Line = dict[str, Any]
Cell = tuple[int, str, str]  # slots, workload, arm
MILLI = 1000.0
RATE = "balanced_requests_per_s"
HEAD = (
    "slots | prompt/output | arm | req/s | against plain | tok/s | TTFT mean, p99 (s) | TPOT mean, p99 (ms) "
    "| ITL p99, worst gap (ms) | steps mixed, decode, prefill | runs"
)


def read(paths: Iterable[Path]) -> list[Line]:
    """Every line of every file."""
    return [json.loads(text) for path in paths for text in path.read_text().splitlines() if text.strip()]


def cells(lines: list[Line]) -> dict[Cell, list[Line]]:
    """The runs of each arm, fewest slots first, else in the order in which they were first seen."""
    found: dict[Cell, list[Line]] = {}
    for line in lines:
        if "tokens_per_s" in line:
            found.setdefault((line["slots"], line["workload"], line["arm"]), []).append(line)
    return dict(sorted(found.items(), key=lambda cell: cell[0][0]))


def tokens_per_s(runs: list[Line]) -> float:
    """Counted for whole queues; for windows, what so many average requests have."""
    if runs[0]["mode"] == "whole":
        return float(np.mean([line["tokens_per_s"] for line in runs]))
    met = load(runs[0]["workload"], SEED)
    return float(np.mean([line[RATE] for line in runs])) * (met.prompt + met.output)


def against_plain(runs: list[Line], plain: list[Line]) -> str:
    """Mean difference to plain vLLM of the same round, and the spread over rounds."""
    base = {line["round"]: line["balanced_requests_per_s"] for line in plain}
    shares = [
        line["balanced_requests_per_s"] / base[line["round"]] - 1 for line in runs if line["round"] in base
    ]
    if not shares:
        return ""
    text = f"{np.mean(shares):+.1%}"
    return text if len(shares) < 2 else f"{text} ({min(shares):+.1%} to {max(shares):+.1%})"


def speed_table(lines: list[Line]) -> str:
    """One row per slots, workload and arm."""
    found = cells(lines)
    rows = [f"| {HEAD} |", "|" + "---|" * (HEAD.count("|") + 1)]
    for (slots, workload, arm), runs in found.items():
        plain = found.get((slots, workload, PLAIN), [])
        mean = _means(runs)
        steps = [sum(line["steps"][kind] for line in runs) for kind in ("mixed", "decode", "prefill")]
        fallen = next((line["fallen"] for line in runs if line["fallen"]), None)
        name = f"{arm} (FELL BACK: {fallen})" if fallen else arm
        parts = [
            f"{slots}",
            workload,
            f"`{name}`",
            f"{mean(RATE):.2f}",
            "" if arm == PLAIN else against_plain(runs, plain),
            f"{tokens_per_s(runs):,.0f}",
            f"{mean('ttft_mean'):.2f}, {mean('ttft_p99'):.2f}",
            f"{mean('tpot_mean') * MILLI:.1f}, {mean('tpot_p99') * MILLI:.1f}",
            f"{mean('itl_p99') * MILLI:.0f}, {max(line['worst_gap'] for line in runs) * MILLI:.0f}",
            ", ".join(f"{count:,}" for count in steps),
            f"{len(runs)}",
        ]
        rows.append(f"| {' | '.join(parts)} |")
    return "\n".join(rows)


def choice_table(lines: list[Line]) -> str:
    """What the policies that learn had settled on at the end of their last run."""
    rows = [
        "| slots | prompt/output | arm | exclusive, share of samples | expected gain | refill |",
        "|---|---|---|---|---|---|",
    ]
    for (slots, workload, arm), runs in cells(lines).items():
        gauges = runs[-1]["gauges"]
        if "share" not in gauges:
            continue
        exclusive = gauges.get("exclusive")
        gain = gauges.get("gain")
        shown = f"{exclusive['mean']:.0%}" if exclusive else "always"
        expected = f"{gain['last']:+.1%}" if gain else ""
        rows.append(
            f"| {slots} | {workload} | `{arm}` | {shown} | {expected} | {gauges['refill']['last']:.0f} |"
        )
    return "\n".join(rows)


def token_table(lines: list[Line]) -> str:
    """Greedy tokens against plain vLLM's."""
    rows = [
        "| arm | identical | first difference, median token | preferred by, median and largest (nats) "
        "| usual lead of the first choice | unexplained | mixed steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        if line.get("mode") != "tokens" or "identical" not in line:
            continue
        some = line["gap_median"] is not None
        gaps = f"{line['gap_median']:.4f}, {line['gap_largest']:.4f}" if some else ""
        at = "" if line["first_difference_median"] is None else f"{line['first_difference_median']:.0f}"
        mixed = f"{line['mixed_steps']} of {line['steps']}" if "steps" in line else ""
        rows.append(
            f"| `{line['arm']}` | {line['identical']} of {line['requests']} | {at} | {gaps} "
            f"| {line['usual_gap_median']:.2f} | {line['unexplained']} | {mixed} |"
        )
    return "\n".join(rows)


def _means(runs: list[Line]) -> Callable[[str], float]:
    return lambda name: float(np.mean([line[name] for line in runs]))


def main(paths: list[str]) -> None:
    """Whatever tables the lines can fill."""
    if not paths:
        sys.exit(f"{__doc__}")
    lines = read(Path(path) for path in paths)
    tables = (speed_table(lines), choice_table(lines), token_table(lines))
    print("\n\n".join(table for table in tables if table.count("\n") > 1))


if __name__ == "__main__":
    main(sys.argv[1:])
