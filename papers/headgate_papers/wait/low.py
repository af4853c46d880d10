"""WAIT's "low demand" experiment: two types of short outputs at 1,000 requests per second each."""

from __future__ import annotations

from headgate_papers.report import Report
from headgate_papers.serving import Options, Outcomes
from headgate_papers.wait.rules import least_thresholds
from headgate_papers.wait.runs import FOR_EVER, Machine, Mix, WaitJob
from headgate_papers.wait.study import (
    BASELINES,
    Scene,
    Way,
    by_type,
    claim,
    figures,
    jobs_of,
    learned,
    load_of,
    pacer,
    printed,
    throughput,
)

NAME = "wait-low"
ABOUT = "WAIT, two types of 10 and 20 output tokens at 1000/s each, 512 slots; and at rates around it"
MACHINE = Machine(slots=512)
MIX = Mix(((1000, 10, 10), (1000, 10, 20)))
FACTORS = (0.01, 0.5, 1.0, 1.4, 2.0, 6.0)
SECONDS = 20.0
FLOOD = 4.0  # seconds of the heaviest load, where the queue only grows
LIGHT = 200.0  # seconds of the lightest load, where few requests come


def least(machine: Machine, mix: Mix) -> tuple[str, dict[str, object]]:
    """The least whole thresholds at the paper's rates, whatever the rate is now."""
    found = least_thresholds(machine.lines(MIX.parts), MIX.parts, machine.kv)
    return "wait", {"thresholds": by_type(list(found.sizes)), **FOR_EVER}


def hurried(machine: Machine, mix: Mix) -> tuple[str, dict[str, object]]:
    """The same with patience: nobody stands still, or waits for a cohort, for more than 10 ms."""
    name, words = least(machine, mix)
    return name, words | {"max_pause": 0.01, "max_wait": 0.01}


def small_steps(machine: Machine, mix: Mix) -> tuple[str, dict[str, object]]:
    """Sarathi-like with 512 tokens per step: the slots of the others, but a prompt takes ten of them."""
    return "mixed", {"budget": min(512, machine.slots), "slots": min(512, machine.slots)}


WAIT: dict[str, Way] = {
    "(10,10)": least,
    "10 ms": hurried,
    "printed": printed,
    "learned": learned,
    "no pause": pacer,
}
WAYS = WAIT | BASELINES | {"b512": small_steps}


def scenes() -> list[Scene]:
    """The paper's rates and others, all on the same machine."""
    return [Scene(f"x{factor:g}", MACHINE, MIX.times(factor), _seconds(factor)) for factor in FACTORS]


def _seconds(factor: float) -> float:
    return LIGHT if factor < 0.1 else FLOOD if factor > 4 else SECONDS


def jobs(options: Options) -> list[WaitJob]:
    """Every rate under every policy."""
    return jobs_of(scenes(), WAYS, options)


def judge(found: Outcomes, options: Options) -> Report:
    """Throughput beside what arrives, and what users see."""
    rows, names = scenes(), tuple(WAYS)
    carried = [scene for scene in rows if load_of(scene.machine, scene.mix) < 1]
    return Report(
        NAME,
        "two types of short outputs",
        (
            "The paper prints no step times, memory or batch limit. Here: d0 = 8 ms, d1 = 0.3 us per KV "
            "token, 100,000 KV tokens, 512 slots for everybody. x1 is the paper's 1000 + 1000 requests/s; "
            f"the slots can carry x{1 / load_of(MACHINE, MIX):.2f}.",
            "(10,10): the least whole thresholds for x1, pausing as long as it takes. 10 ms: the same, but "
            "nobody stands still or waits for a cohort for longer. printed: the paper's rule with B = 512. "
            "learned: `wait` as it comes. no pause: the same with max_pause=0. v0 is vLLM-like (prefill "
            "first), mixed Sarathi-like; b512 the same with 512 tokens per step instead of 4096.",
        ),
        (
            throughput(found, rows, names),
            figures(found, rows, names, "Requests/s", "requests"),
            figures(found, rows, names, "Mean latency, s", "latency"),
            figures(found, rows, names, "Mean TPOT, ms", "tpot", 1e3),
            figures(found, rows, names, "Most KV held, tokens", "peak"),
        ),
        (
            claim(found, rows, WAIT, "decodes", "WAIT serves more than a baseline (paper: at all rates)"),
            claim(found, carried, WAIT, "latency", "WAIT has the lower latency, where slots suffice"),
        ),
        _remarks(found),
    )


def _remarks(found: Outcomes) -> tuple[str, ...]:
    mixed, wait = (found.figure(("x1", name), "latency") for name in ("mixed", "(10,10)"))
    light = [found.figure(("x0.01", name), "tpot") * 1e3 for name in ("(10,10)", "10 ms", "learned", "mixed")]
    return (
        "Below saturation throughput is equal by construction: everything that arrives is served, by any "
        "policy that keeps its queues bounded.",
        f"At the paper's rates WAIT's latency is {100 * (wait / mixed - 1):+.0f} % against mixed batching; "
        "it is lower than v0's, which pays the fixed cost of an iteration for each of its prefill batches.",
        f"With a hundredth of the traffic thresholds for the full one make a TPOT of {light[0]:.0f} ms: a "
        f"type moves only when ten more have come. Patience of 10 ms makes it {light[1]:.0f}, learned "
        f"thresholds {light[2]:.0f}, mixed batching {light[3]:.1f}.",
        *_why(found),
    )


def _why(found: Outcomes) -> tuple[str, ...]:
    """Two things that would make the paper's claim true, in numbers."""
    tokens, requests = (
        100 * (found.figure(("x6", "printed"), name) / found.figure(("x6", "mixed"), name) - 1)
        for name in ("decodes", "requests")
    )
    learned, small = (found.figure(("x1.4", name), "decodes") / 1e3 for name in ("learned", "b512"))
    return (
        "Far above saturation (x6) everybody runs full batches, but for (10,10) and 10 ms, whose thresholds "
        "are for x1, and b512. The printed rule then serves "
        f"{tokens:+.0f} % tokens but {requests:+.0f} % requests against mixed batching, by serving short "
        "ones out of proportion: counted in requests WAIT is ahead. Near saturation it serves less, because "
        "the slots of one type stand empty while the other's queue grows.",
        "A baseline whose steps hold as many tokens as the others have slots (512) falls behind as soon as "
        f"its prompts do not fit: at x1.4 it serves {small:.1f} thousand tokens/s, WAIT {learned:.1f}. The "
        "paper says equal batch limits and does not say of what.",
    )
