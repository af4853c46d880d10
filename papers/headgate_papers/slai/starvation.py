"""What shortest-prompt-first does to long prompts at 1.6 requests/s, what ageing and priority change."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

from headgate_papers.report import REFERENCE, Cell, Count, Row, Section
from headgate_papers.slai.chat_runs import BUDGET, ChatJob, Seeds
from headgate_papers.slai.published import LONG_PROMPT, REFERENCE_LONG, REFERENCE_PRIORITY

RATE = 1.6
STUDY = "1.6"  # in keys, beside the curves
PAPERS: dict[str, Any] = {"pace": "average", "shrink": False, "offset": 5, "relaxed": 0.96}
AGED, AGED_FAST = 100.0, 1000.0  # tokens per second of waiting; the engine prefills some 9,700
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Sarathi": ("sarathi", {}),
    "Sarathi SPF": ("sarathi-spf", {}),
    "Sarathi SPF, aged": ("sarathi-spf", {"ageing": AGED}),
    "SLAI dyn": ("slai", {**PAPERS, "ageing": 0.0}),
    "SLAI dyn, aged": ("slai", {**PAPERS, "ageing": AGED}),
    "SLAI dyn, fast": ("slai", {**PAPERS, "ageing": AGED_FAST}),
    "SLAI dyn, priority": ("slai", {**PAPERS, "ageing": 0.0, "order": "priority"}),
    "slai": ("slai", {}),
    "slai, deadlines": ("slai", {"order": "deadline"}),
}

KNOWN = dict(zip(("SLAI dyn", "SLAI dyn, priority"), REFERENCE_PRIORITY, strict=True))


def jobs(seeds: Sequence[int], seconds: float) -> list[ChatJob]:
    """Every case at the rate of the study."""
    return [
        ChatJob((STUDY, label, seed), policy, settings, RATE, 5, seed, seconds, BUDGET)
        for seed in seeds
        for label, (policy, settings) in CASES.items()
    ]


def sections(figures: Seeds) -> list[Section]:
    """Long prompts beside all, and paying users beside free ones."""
    long, classes = [], []
    for label in CASES:
        key = (STUDY, label)
        names = ("ttft", "ttft_mean", "ttft_long", "longest")
        long.append(Row(label, tuple(Cell(nan, figures.mean(key, name)) for name in names)))
        paying = KNOWN.get(label, nan)
        means = (Cell(paying, figures.mean(key, "ttft_paying")), Cell(nan, figures.mean(key, "ttft_free")))
        classes.append(Row(label, means))
    columns = ("median", "mean", f">= {LONG_PROMPT}", "longest")
    return [
        Section(
            "TTFT at 1.6 requests/s, s: all, and prompts of the longest tenth", "policy", columns, tuple(long)
        ),
        Section(
            "Mean TTFT at 1.6 requests/s by class, s",
            "policy",
            ("paying", "free"),
            tuple(classes),
            against=REFERENCE,
        ),
    ]


def counts(figures: Seeds) -> tuple[Count, ...]:
    """What the paper says of priority."""
    before, after = (
        figures.mean((STUDY, label), "ttft_paying") for label in ("SLAI dyn", "SLAI dyn, priority")
    )
    return (Count(f"priority lowers the mean TTFT of paying users at {RATE}", int(after < before), 1),)


def remarks(figures: Seeds) -> tuple[str, ...]:
    """Starvation, and what helps."""

    def seen(label: str, name: str) -> float:
        return figures.mean((STUDY, label), name)

    return (
        f"Starvation: at 1.6 requests/s prompts of {LONG_PROMPT} tokens and more wait "
        f"{seen('SLAI dyn', 'ttft_long'):.1f} s (median) under SLAI dyn, where the median over all is "
        f"{seen('SLAI dyn', 'ttft'):.2f} s (reference {REFERENCE_LONG} and 0.92 s); the longest wait is "
        f"{seen('SLAI dyn', 'longest'):.0f} s. Under Sarathi they wait "
        f"{seen('Sarathi', 'ttft_long'):.1f} s, the longest wait is {seen('Sarathi', 'longest'):.0f} s.",
        f"Ageing by {AGED:.0f} and {AGED_FAST:.0f} tokens a second: the longest wait is "
        f"{seen('SLAI dyn, aged', 'longest'):.0f} and {seen('SLAI dyn, fast', 'longest'):.0f} s instead of "
        f"{seen('SLAI dyn', 'longest'):.0f} s, the median {seen('SLAI dyn, aged', 'ttft'):.2f} and "
        f"{seen('SLAI dyn, fast', 'ttft'):.2f} s instead of {seen('SLAI dyn', 'ttft'):.2f} s.",
        "Priority for paying users: their mean TTFT is "
        f"{seen('SLAI dyn, priority', 'ttft_paying'):.2f} s instead of "
        f"{seen('SLAI dyn', 'ttft_paying'):.2f} s, that of free users "
        f"{seen('SLAI dyn, priority', 'ttft_free'):.2f} s instead of {seen('SLAI dyn', 'ttft_free'):.2f} s.",
    )
