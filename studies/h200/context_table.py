"""Results of `studies.h200.context` beside the simulator's, from files named on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from headgate.experiment.library import card_engine, simulate
from headgate.methods.make import make_policy, split_name
from headgate.sim.engine.engine import Engine
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Workload
from studies.h200.context import talks

Line = dict[str, Any]
LONG = ("prompt", "TTFT measured (ms)", "TTFT simulated (ms)", "difference")
SHARED = (
    "arm",
    "",
    "hit share",
    "TTFT mean, p50, p95, p99 (ms)",
    "gap p50, p95, p99 (ms)",
    "all served after (s)",
)


def engine(setup: Line, kv_tokens: int) -> Engine:
    """The simulated twin."""
    found = card_engine(setup["card"], slots=setup["slots"], budget=setup["budget"], kv_tokens=kv_tokens)
    return found._replace(max_model_len=setup["longest"])


def long_rows(lines: list[Line], twin: Engine) -> list[tuple[str, ...]]:
    """The median of each length."""
    rows: list[tuple[str, ...]] = []
    for prompt in sorted({line["prompt"] for line in lines}):
        seen = float(np.median([line["ttft"] for line in lines if line["prompt"] == prompt]))
        run = simulate(twin, policy("plain", twin), Workload.of([prompt], [2]), asynchronous=True)
        said = float(run.requests["first_token"][0] - run.requests["arrival"][0])
        rows.append(
            (f"{prompt:,}", f"{1e3 * seen:.0f}", f"{1e3 * said:.0f}", f"{100 * (said / seen - 1):+.1f} %")
        )
    return rows


def shared_rows(line: Line, twin: Engine) -> list[tuple[str, ...]]:
    """Measured and simulated."""
    load = talks(line["rate"], line["seconds"])
    run = simulate(twin, policy(line["arm"], twin), load, asynchronous=True)
    first = run.requests["first_token"] - run.requests["arrival"]
    gaps = np.concatenate([np.asarray(each) for each in Gaps(run).lists()])
    hit = run.requests["cached"].sum() / load.prompt.sum()
    seen = (f"{100 * line['cached_tokens'] / line['prompt_tokens']:.1f} %", _times(line["ttft"]))
    seen_gaps = ", ".join(f"{1e3 * line['gap'][name]:.1f}" for name in ("p50", "p95", "p99"))
    said_gaps = ", ".join(f"{1e3 * x:.1f}" for x in np.quantile(gaps, (0.5, 0.95, 0.99)))
    return [
        (f"`{line['arm']}`", "measured", *seen, seen_gaps, f"{line['ended']:.1f}"),
        (
            f"`{line['arm']}`",
            "simulated",
            f"{100 * hit:.1f} %",
            _times(first),
            said_gaps,
            f"{run.requests['finished'].max():.1f}",
        ),
    ]


def policy(arm: str, twin: Engine) -> Any:
    """`plain` is vLLM's own scheduling."""
    return make_policy(*split_name("mixed" if arm == "plain" else arm), twin)[0]


def tables(file: str) -> Iterable[str]:
    """Markdown, one table for each scene."""
    lines = [json.loads(row) for row in Path(file).read_text(encoding="utf-8").splitlines()]
    setup = lines[0]
    twin = engine(setup["setup"], setup["kv_tokens"])
    alone = [line for line in lines if line.get("scene") == "long"]
    if alone:
        yield _markdown(LONG, long_rows(alone, twin))
    together = [line for line in lines if line.get("scene") == "shared"]
    if together:
        yield _markdown(SHARED, [row for line in together for row in shared_rows(line, twin)])


def _times(values: Any) -> str:
    found = np.asarray(values)
    return ", ".join(f"{1e3 * x:.0f}" for x in (found.mean(), *np.quantile(found, (0.5, 0.95, 0.99))))


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


if __name__ == "__main__":
    print("\n\n".join(text for file in sys.argv[1:] for text in tables(file)))
