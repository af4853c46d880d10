"""Traces as a router writes them, with known rates, lengths and patience."""

import json
from pathlib import Path

import numpy as np


def line(kind: str, arrival: float, wait: float, output: int, outcome: str = "ok", **more) -> dict:
    placed = arrival + wait if outcome in ("ok", "cut") else None
    record = {
        "route": 1, "router": "least-loaded", "class": kind, "arrival": arrival, "placed": placed,
        "first_token": placed, "finished": arrival + wait + 0.01 * output, "prompt": 300, "output": output,
        "replay_output": max(output, 1), "limit": 4096, "priority": 0, "engine": 0, "tries": 1, "cached": 0,
        "outcome": "client-gone" if outcome == "cut" else outcome,
    }  # fmt: skip
    return {**record, **more}


def written(path: Path, seconds: float = 2000.0, seed: int = 0) -> Path:
    """Two classes: 3 and 1 requests a second, outputs of mean 100 and 20, patience of chat 5 s."""
    draw, lines = np.random.default_rng(seed), []
    for kind, rate, mean in (("chat", 3.0, 100.0), ("batch", 1.0, 20.0)):
        for arrival in draw.uniform(0, seconds, draw.poisson(rate * seconds)).tolist():
            wait, patience = float(draw.exponential(2.0)), float(draw.exponential(5.0))
            output, hangs_up = int(draw.geometric(1 / mean)), int(draw.geometric(1 / 200))
            if kind == "chat" and patience < wait:
                lines.append(line(kind, arrival, patience, 0, "client-gone"))
            elif hangs_up < output:
                lines.append(line(kind, arrival, wait, hangs_up, "cut"))
            else:
                lines.append(line(kind, arrival, wait, output))
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path
