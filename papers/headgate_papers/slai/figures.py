"""Figures 6, 9 and 10 of the SLAI paper: TTFT and TBT against the rate at 5, 50 and 95 % paying users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, nan
from typing import Any

from headgate_papers.report import PAPER, REFERENCE, Cell, Count, Report, Row, Section, sign
from headgate_papers.serving import Options, Outcomes
from headgate_papers.slai import starvation as slai_starvation
from headgate_papers.slai.chat_runs import BUDGET, ChatJob, Seeds, best_rate, offered
from headgate_papers.slai.published import (
    BOTH_LIMITS,
    CAPACITY,
    HIGH_LOAD,
    REFERENCE_CAPACITY,
    REFERENCE_HIGH_LOAD,
    REFERENCE_TBT,
    REFERENCE_TTFT,
)

RATES = (0.8, 1.0, 1.15, 1.25, 1.35, 1.4, 1.45, 1.5, 1.6)
QUICK_RATES = (1.0, 1.5, 1.6)
SHOWN = (0.8, 1.0, 1.15, 1.35, 1.45, 1.5, 1.6)
SECONDS, QUICK_SECONDS = 2100.0, 150.0
HIGH = 1.5
MEDIAN, PAYING_TBT = 0.5, 0.1  # limits, s
WORSE = 0.98  # a capacity below this share of another is worth an explanation
BUNCHES = (
    " The paper's variant pays for TTFT with the TBT it promised, since deferred decodes come in bunches and "
    "make single steps longer; ours cuts the prompts of such steps."
)
AS_PAPER: dict[str, Any] = {"pace": "average", "shrink": False, "ageing": 0, "crowded": 0.96, "relaxed": 0.96}
POLICIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "vLLM": ("v0", {}, 8192),
    "Sarathi": ("sarathi", {}, BUDGET),
    "Sarathi SPF": ("sarathi-spf", {}, BUDGET),
    "SLAI FCFS": ("slai", {**AS_PAPER, "order": "arrival", "offset": 10}, BUDGET),
    "SLAI SPF": ("slai", {**AS_PAPER, "offset": 10}, BUDGET),
    "SLAI dyn": ("slai", {**AS_PAPER, "offset": 5}, BUDGET),
    "slai": ("slai", {}, BUDGET),
}
BRIEF = ("vLLM", "Sarathi", "Sar.SPF", "SLAI-F", "SLAI-S", "SLAI-D", "slai")  # the same as column heads


@dataclass(frozen=True)
class Figure:
    """One figure: its name, and the share of paying users in percent."""

    NAME: str
    paying: int

    @property
    def ABOUT(self) -> str:  # noqa: N802  # as the modules of other experiments have it
        """One line for the list."""
        return f"median TTFT and P99 TBT against the rate, {self.paying} % paying users; capacity at 0.5 s"

    def jobs(self, options: Options) -> list[ChatJob]:
        """Every policy at every rate and seed; the starvation study comes with the first figure."""
        rates, seconds = (QUICK_RATES, QUICK_SECONDS) if options.quick else (RATES, SECONDS)
        found = [
            ChatJob((label, rate, seed), policy, settings, rate, self.paying, seed, seconds, budget)
            for seed in seeds(options)
            for rate in rates
            for label, (policy, settings, budget) in POLICIES.items()
        ]
        return found + (slai_starvation.jobs(seeds(options), seconds) if self.paying == 5 else [])

    def judge(self, outcomes: Outcomes, options: Options) -> Report:
        """Capacities against the paper's and the reference's, then the curves."""
        rates = QUICK_RATES if options.quick else RATES
        curves = Curves(Seeds(outcomes, seeds(options)), rates)
        sections = [*_capacities(curves, self.paying), *_high_load(curves, self.paying)]
        sections += _curves(curves, self.paying, [rate for rate in SHOWN if rate in rates])
        if self.paying == 5:
            sections += slai_starvation.sections(curves.figures)
        return Report(
            self.NAME,
            f"{self.paying} % paying users, RTX 6000 Ada, Mistral-7B",
            _setup(self.paying, options),
            tuple(sections),
            (*_counts(curves), *(slai_starvation.counts(curves.figures) if self.paying == 5 else ())),
            (*_remarks(curves, self.paying), _work(options)),
        )


class Curves:
    """Figures against the rate, averaged over seeds."""

    def __init__(self, figures: Seeds, rates: Sequence[float]) -> None:
        self.figures, self.rates = figures, rates

    def at(self, label: str, rate: float, name: str) -> float:
        """One figure at one rate; NaN where that rate was not run."""
        return self.figures.mean((label, rate), name) if rate in self.rates else nan

    def crossing(self, label: str, name: str, limit: float) -> float:
        """The rate at which a figure first reaches its limit, interpolated in its logarithm.

        Never below the lowest rate that was run; the highest one where the limit is never reached.
        """
        values = [self.at(label, rate, name) for rate in self.rates]
        for place, (rate, value) in enumerate(zip(self.rates, values, strict=True)):
            if value > limit:
                if place == 0:
                    return rate
                before, step = values[place - 1], rate - self.rates[place - 1]
                return rate - step * log(value / limit) / log(value / before)
        return self.rates[-1]

    def capacity(self, label: str, both: bool = False) -> float:
        """Requests per second at the median TTFT allowed, and with the paying users' P99 TBT too."""
        found = self.crossing(label, "ttft", MEDIAN)
        return min(found, self.crossing(label, "tbt_paying", PAYING_TBT)) if both else found


def seeds(options: Options) -> range:
    """One to try it, four to quote it."""
    return range(1 if options.quick else 4)


def _setup(paying: int, options: Options) -> tuple[str, ...]:
    seconds, many = (QUICK_SECONDS, "one seed") if options.quick else (SECONDS, "four seeds")
    return (
        f"Poisson arrivals for {seconds:g} s, lengths drawn from the sharegpt-8k trace, {paying} % paying "
        f"users (TBT 0.1 s, free 0.5 s); {many}. Figures are of requests that finished before "
        "the stop, as in the paper. 128 slots, steps of 512 tokens (vLLM: 8192), 224,000 KV tokens; card "
        f"pub-rtx-ada-6000-mistral-7b. No policy is stable beyond λ* = {best_rate():.3f} requests/s.",
        "SLAI FCFS, SPF: offset 10; dyn: offset 5, 10 when 96 % of the KV are used; running mean of steps. "
        "slai: ours, predicted steps, chunks cut to keep TBT, ageing. ref.: a reference simulation, an "
        "independent program, 2 or 3 seeds. The card's price of context was chosen to put Sarathi at 0.5 s "
        "at 1.15 requests/s.",
    )


def _capacities(curves: Curves, paying: int) -> list[Section]:
    rows, enforced = [], []
    for label in POLICIES:
        ours = curves.capacity(label)
        known = (table[paying].get(label, nan) for table in (CAPACITY, REFERENCE_CAPACITY))
        rows.append(Row(label, tuple(Cell(value, ours) for value in known)))
        both = BOTH_LIMITS.get(label, nan) if paying == 5 else nan
        enforced.append(Row(label, (Cell(both, curves.capacity(label, both=True)),)))
    paper, reference = (tuple(Row(row.setting, (row.cells[place],)) for row in rows) for place in (0, 1))
    title, column = "Requests/s at a median TTFT of 0.5 s", ("capacity",)
    strict = f"{title} and a P99 TBT of paying users of 0.1 s"
    return [
        Section(title, "policy", column, paper),
        Section(f"{title}, against the reference", "policy", column, reference, against=REFERENCE),
        Section(strict, "policy", column, tuple(enforced), against=REFERENCE),
    ]


def _high_load(curves: Curves, paying: int) -> list[Section]:
    found, title = [], f"Median TTFT at {HIGH} requests/s, s"
    both = ((title, HIGH_LOAD, PAPER), (f"{title}, against the reference", REFERENCE_HIGH_LOAD, REFERENCE))
    for title, table, against in both:
        rows = [
            Row(label, (Cell(table[paying].get(label, nan), curves.at(label, HIGH, "ttft")),))
            for label in POLICIES
        ]
        found.append(Section(title, "policy", ("median",), tuple(rows), against=against))
    return found


def _curves(curves: Curves, paying: int, rates: Sequence[float]) -> list[Section]:
    """All policies by rate; beside the reference's numbers for two of them at 5 %."""
    titles = {
        "ttft": "Median TTFT, s",
        "ttft_all": "Median TTFT of everybody who came, s (inf: no token before the stop)",
        "ttft_mean": "Mean TTFT, s",
        "tbt_paying": "P99 TBT of paying users, s",
        "tbt_free": "P99 TBT of free users, s",
    }
    found = []
    for name, title in titles.items():
        rows = tuple(
            Row(f"{rate:g}", tuple(Cell(nan, curves.at(label, rate, name)) for label in POLICIES))
            for rate in rates
        )
        found.append(Section(title, "req/s", BRIEF, rows))
    if paying == 5:
        found += _against_reference(curves, rates)
    return found


def _against_reference(curves: Curves, rates: Sequence[float]) -> list[Section]:
    found = []
    for label in ("Sarathi", "SLAI dyn"):
        rows = []
        for rate in rates:
            paying, free = REFERENCE_TBT[label].get(rate, (nan, nan))
            known = (REFERENCE_TTFT[label].get(rate, nan), paying, free)
            names = ("ttft", "tbt_paying", "tbt_free")
            cells = (
                Cell(value, curves.at(label, rate, name)) for value, name in zip(known, names, strict=True)
            )
            rows.append(Row(f"{rate:g}", tuple(cells)))
        columns = ("TTFT", "paying", "free")
        found.append(
            Section(
                f"{label} against the reference, s: median TTFT, P99 TBT",
                "req/s",
                columns,
                tuple(rows),
                against=REFERENCE,
            )
        )
    return found


def _counts(curves: Curves) -> tuple[Count, ...]:
    """The paper's qualitative claims, rate by rate."""
    rates = list(curves.rates)
    busy = [rate for rate in rates if rate >= 1.15]

    def pairs(one: str, other: str, name: str, wanted: int, at: list[float]) -> list[tuple[object, object]]:
        return [(wanted, sign(curves.at(other, rate, name), curves.at(one, rate, name))) for rate in at]

    spf = pairs("Sarathi", "Sarathi SPF", "ttft", -1, busy) + pairs("SLAI FCFS", "SLAI SPF", "ttft", -1, busy)
    sarathi = [curves.at("Sarathi", rate, "tbt_paying") for rate in rates]
    rising = [(1, sign(after, before)) for before, after in pairwise(sarathi)]
    free = [curves.at("SLAI dyn", rate, "tbt_free") for rate in busy]
    falling = [(-1, sign(after, before)) for before, after in pairwise(free)]
    done = [curves.at(label, rates[-1], "finished") for label in ("Sarathi", "SLAI dyn")]
    least = min(POLICIES, key=lambda label: curves.at(label, rates[0], "ttft"))
    broken = [(True, curves.at("vLLM", rate, "tbt_paying") > PAYING_TBT) for rate in rates]
    claims: dict[str, Sequence[tuple[object, object]]] = {
        "shortest first has the lower median TTFT (Sarathi, SLAI; from 1.15 on)": spf,
        "SLAI dyn has a lower median TTFT than Sarathi": pairs("Sarathi", "SLAI dyn", "ttft", -1, rates),
        f"vLLM has the lowest median TTFT at {rates[0]}": [("vLLM", least)],
        "vLLM breaks the TBT of paying users, rate by rate": broken,
        "P99 TBT of Sarathi rises with the rate": rising,
        "P99 TBT of free users under SLAI dyn falls with the rate": falling,
        f"SLAI dyn finishes 95 % of what Sarathi does at {rates[-1]}": [(True, done[1] >= 0.95 * done[0])],
    }
    return tuple(Count.of_pairs(what, list(found)) for what, found in claims.items())


def _remarks(curves: Curves, paying: int) -> tuple[str, ...]:
    base, dynamic, ours = (curves.capacity(label) for label in ("Sarathi", "SLAI dyn", "slai"))
    strict = {label: curves.capacity(label, both=True) for label in POLICIES}
    paper = CAPACITY[paying]
    low, high = curves.figures.range(("Sarathi", HIGH), "ttft")

    def gain(value: float, over: float) -> str:
        return f"{100 * (value / over - 1):+.0f} %"

    def share(rate: float) -> str:
        return f"{100 * rate / best_rate():.0f} %"

    why = BUNCHES if strict["SLAI dyn"] < WORSE * dynamic else ""
    found = [
        f"Capacity at a median of 0.5 s: Sarathi {base:.2f}, SLAI dyn {dynamic:.2f} ({gain(dynamic, base)}; "
        f"paper {gain(paper['SLAI dyn'], paper['Sarathi'])}), our slai {ours:.2f} ({gain(ours, base)}): "
        f"{share(base)}, {share(dynamic)} and {share(ours)} of λ*.",
        f"With the paying users' P99 TBT of 0.1 s enforced too: Sarathi {strict['Sarathi']:.2f}, SLAI dyn "
        f"{strict['SLAI dyn']:.2f} ({gain(strict['SLAI dyn'], strict['Sarathi'])}), our slai "
        f"{strict['slai']:.2f} ({gain(strict['slai'], strict['Sarathi'])}).{why}",
        f"Near saturation seeds differ: Sarathi's median TTFT at {HIGH} requests/s lies between {low:.2f} "
        f"and {high:.2f} s here, so single TTFTs there are no evidence (the paper quotes 1.5 "
        "and 2.0 s for a policy that does not see classes).",
    ]
    means = [curves.at(label, curves.rates[-1], "ttft_mean") for label in ("Sarathi SPF", "SLAI dyn", "slai")]
    found.append(
        f"Mean TTFT at {curves.rates[-1]} requests/s: Sarathi SPF {means[0]:.2f} s, SLAI dyn {means[1]:.2f} "
        f"s, our slai {means[2]:.2f} s: a lower median need not be a lower mean."
    )
    return tuple(found) + (slai_starvation.remarks(curves.figures) if paying == 5 else ())


def _work(options: Options) -> str:
    drawn = [options.seed + seed for seed in seeds(options)]
    share = offered(1.15, drawn, QUICK_SECONDS if options.quick else SECONDS)
    return (
        f"The requests drawn here bring {100 * share:.1f} % of the nominal work (at 1.15 requests/s), so "
        "capacities are off by about as much."
    )


FIGURES = (Figure("slai-fig6", 5), Figure("slai-fig9", 50), Figure("slai-fig10", 95))
