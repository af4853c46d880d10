"""What a soak must show: memory that does not grow with requests, answers that do not change, nobody lost."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np

MOST_BYTES = 50.0  # of engine memory a request, above plain vLLM
LEAST_EQUAL = 0.97  # of greedy answers; on a CPU near-ties round differently in another batch
MOST_SLOWER = 2.0  # p99 latency against plain vLLM's


class Slope(NamedTuple):
    """Bytes a request by least squares, and its standard error."""

    bytes: float
    error: float


class Soaked(NamedTuple):
    """What one server went through."""

    sent: int
    answered: int
    hung_up: int
    failures: list[str]  # the first few, in words
    texts: dict[int, set[str]]  # by prompt: every answer that was given to it
    seconds: dict[str, list[float]]  # latencies of those answered, by policy
    memory: list[tuple[int, int]]  # requests finished, bytes of the engine


def slope(memory: list[tuple[int, int]], skip: float = 0.5) -> Slope:
    """Of the engine's memory over requests finished, without the first part in which caches fill."""
    points = np.array(memory[int(len(memory) * skip) :], float)
    if len(points) < 3 or np.ptp(points[:, 0]) == 0:
        return Slope(0.0, float("inf"))
    x, y = points[:, 0] - points[:, 0].mean(), points[:, 1]
    steep = float(x @ y / (x @ x))
    rest = y - y.mean() - steep * x
    return Slope(steep, sqrt(float(rest @ rest) / (len(x) - 2) / float(x @ x)))


def equal(plain: dict[int, set[str]], gated: dict[int, set[str]]) -> float:
    """The share of prompts, asked of both, to which one gave no answer that the other never gave."""
    both = plain.keys() & gated.keys()
    return sum(bool(plain[each] & gated[each]) for each in both) / len(both) if both else 0.0


def verdicts(
    plain: Soaked, gated: Soaked, left: dict[str, float], fallen: float
) -> list[tuple[str, str, bool]]:
    """Each check: its name, what was seen, and whether it passed."""
    ours, theirs = slope(gated.memory), slope(plain.memory)
    more, error = ours.bytes - theirs.bytes, sqrt(ours.error**2 + theirs.error**2)
    lost = gated.sent - gated.answered - gated.hung_up
    late = [
        float(np.percentile(np.concatenate(list(each.seconds.values())), 99)) if each.seconds else 0.0
        for each in (gated, plain)
    ]
    same = equal(plain.texts, gated.texts)
    return [
        ("lost", f"{lost} of {gated.sent} requests", lost == 0),
        ("failures", "; ".join(gated.failures) or "none", not gated.failures),
        ("answers equal to plain vLLM's", f"{same:.2%}", same >= LEAST_EQUAL),
        (
            "engine memory above plain vLLM's",
            f"{more:.0f} +- {2 * error:.0f} bytes a request ({ours.bytes:.0f} against {theirs.bytes:.0f})",
            more - 2 * error < MOST_BYTES,
        ),
        ("books empty when idle", f"{left}", not any(left.values())),
        ("policies fallen", f"{fallen:g}", fallen == 0),
        (
            "p99 latency against plain vLLM's",
            f"{late[0]:.2f} s against {late[1]:.2f} s",
            late[0] <= MOST_SLOWER * late[1],
        ),
    ]
