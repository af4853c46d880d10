"""λ* and how close policies come to it: saturated throughput of the RAD and SLAI paper's chat traffic."""

from __future__ import annotations

from math import floor, nan
from typing import Any

from headgate.core.errors import InputError
from headgate.cost.laws.tiles import TileCost, TileTerms
from headgate.methods.bounds import Bound, Requests, decode_reads, tile_bound
from headgate.workloads.traces import bundled
from headgate_papers.report import REFERENCE, Cell, Count, Report, Row, Section, sign
from headgate_papers.serving import Options, Outcomes
from headgate_papers.slai.chat_runs import (
    SLOTS,
    UNLIMITED,
    ChatJob,
    engine_of,
    lengths_of,
    sample,
)
from headgate_papers.slai.published import REFERENCE_BOUND, REFERENCE_SAMPLE, REFERENCE_SATURATED

NAME = "slai-bounds"
ABOUT = "the rate no policy exceeds, and what RAD, Sarathi, vLLM and ours reach of it when saturated"
REQUESTS = 4000
PLAIN, FULL, MEMORY = "equation 7", "full", "with KV"
LONGEST = 8192
Settings = tuple[str, dict[str, Any], int]  # policy, its settings, tokens in a step


def rad(chunk: int, cycle: int | None = None) -> Settings:
    """RAD with one tile of decodes; the engine's step holds the chunk."""
    settings: dict[str, Any] = {"chunk": chunk} | ({} if cycle is None else {"cycle": cycle})
    return "rad", settings, max(chunk, 512)


SARATHI: dict[str, Settings] = {f"Sarathi {size}": ("sarathi", {}, size) for size in (512, 1024)}
VLLM: Settings = ("v0", {}, 8192)
CASES: dict[str, dict[str, Settings]] = {
    PLAIN: {
        **{f"RAD n={n}": rad(128, n) for n in (128, 256, 512, 1024, 2048)},
        "RAD": rad(128),
        "Sarathi 512": SARATHI["Sarathi 512"],
        "vLLM": VLLM,
    },
    FULL: {
        **{f"RAD chunk {size}": rad(size) for size in (128, 256, 512, 1024, 2048)},
        **SARATHI,
        "vLLM": VLLM,
        "rad-smooth": ("rad-smooth", {"cycle": 512}, 512),
        "slai": ("slai", {}, 512),
        "eb refill 16": ("eb", {"refill": 16}, 8192),
        "eb+": ("eb+", {}, 8192),
        "request-level": ("request-level", {}, 8192),
    },
    MEMORY: {
        "RAD chunk 512": rad(512),
        "Sarathi 512": SARATHI["Sarathi 512"],
        "vLLM": VLLM,
        "slai": ("slai", {}, 512),
        "eb+": ("eb+", {}, 8192),
    },
}
TITLES = {
    PLAIN: "Without constant and floor (the paper's model), unlimited KV",
    FULL: "The calibrated card, unlimited KV",
    MEMORY: "The calibrated card with its 14,000 KV blocks",
}


def jobs(options: Options) -> list[ChatJob]:
    """Every policy on the same requests, all there at the start."""
    kv = {PLAIN: UNLIMITED, FULL: UNLIMITED, MEMORY: None}
    return [
        ChatJob(
            (case, label),
            policy,
            settings,
            budget=budget,
            requests=options.requests(REQUESTS),
            kv=kv[case],
            plain=case == PLAIN,
        )
        for case, rows in CASES.items()
        for label, (policy, settings, budget) in rows.items()
    ]


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Shares of λ*, beside those of the reference simulation."""
    drawn = sample(options.requests(REQUESTS), options.seed)
    bound = tile_bound(_terms(), lengths_of(drawn))
    sections = [_bounds(), *(_saturated(outcomes, case, bound.rate) for case in CASES)]
    setup = (
        f"{len(drawn)} requests with lengths from the sharegpt-8k trace, all at once, {SLOTS} slots; steps "
        "as on card pub-rtx-ada-6000-mistral-7b. ref. is a reference simulation, an "
        f"independent program with its own sample (λ* {REFERENCE_SAMPLE}); the paper has no such table.",
        f"λ* of these requests: {bound.rate:.4f} requests/s (a request takes {1e3 * bound.seconds:.1f} ms at "
        "least).",
    )
    return Report(
        NAME,
        "throughput as a share of what is possible",
        setup,
        tuple(sections),
        _counts(outcomes),
        _remarks(outcomes, bound.rate),
    )


def _bounds() -> Section:
    """λ* of the whole trace; both ways to count the stop token."""
    trace = bundled("sharegpt-8k")
    rows = []
    for label, stop in (("with stop step", 1), ("without", 0)):
        found = tile_bound(_terms(), Requests.of(trace.prompt, trace.output - 1 + stop))
        milliseconds, rate = REFERENCE_BOUND[label]
        rows.append(Row(label, (Cell(milliseconds, 1e3 * found.seconds), Cell(rate, found.rate))))
    columns = ("least time, ms", "λ*, requests/s")
    return Section("The bound for the whole trace", "output steps", columns, tuple(rows), against=REFERENCE)


def _saturated(outcomes: Outcomes, case: str, best: float) -> Section:
    rows = []
    known = REFERENCE_SATURATED[case]
    for label in CASES[case]:
        rate, reference = outcomes.figure((case, label), "finished"), known.get(label, nan)
        share = Cell(100 * reference / REFERENCE_SAMPLE, 100 * rate / best)
        rows.append(Row(label, (share,)))
    return Section(
        f"{TITLES[case]}: % of λ*", "policy", ("share of λ*",), tuple(rows), points=True, against=REFERENCE
    )


def _counts(outcomes: Outcomes) -> tuple[Count, ...]:
    """Which of two serves more, over all pairs of the reference; and no policy above the bound."""
    counts = []
    for case, known in REFERENCE_SATURATED.items():
        labels = list(known)
        pairs: list[tuple[object, object]] = []
        for place, one in enumerate(labels):
            for other in labels[place + 1 :]:
                ours = [outcomes.figure((case, label), "finished") for label in (one, other)]
                if wanted := sign(known[other], known[one]):
                    pairs.append((wanted, sign(ours[1], ours[0])))
        counts.append(
            Count.of_pairs(f"{case}: which of two serves more (differences above 1 %)", pairs, REFERENCE)
        )
    return tuple(counts)


def _remarks(outcomes: Outcomes, best: float) -> tuple[str, ...]:
    trace = bundled("sharegpt-8k")
    bound = tile_bound(_terms(), Requests.of(trace.prompt, trace.output))
    number = cycle_requests(_terms(), bound, LONGEST, 0.1)

    def share(case: str, label: str) -> str:
        return f"{100 * outcomes.figure((case, label), 'finished') / best:.0f} %"

    whole = Requests.of(trace.prompt, trace.output - 1)
    free, limited = tile_bound(_terms(), whole), tile_bound(_terms(), whole, batch_tokens=512)
    evictions = outcomes.figure((MEMORY, "vLLM"), "evictions")
    return (
        f"Theorem 2 asks for cycles of at least {number:,} requests at 90 % load; with 1,024 RAD reaches "
        f"{share(PLAIN, 'RAD n=1024')} of λ*. The number belongs to the proof, not to a configuration.",
        f"In the paper's own model Sarathi reaches {share(PLAIN, 'Sarathi 512')}, RAD without cycles "
        f"{share(PLAIN, 'RAD')}: nothing is left to win. With the constant and the floor of a real step, "
        f"RAD in the paper's one-tile chunks falls to {share(FULL, 'RAD chunk 128')}, with four tiles it has "
        f"{share(FULL, 'RAD chunk 512')}.",
        "λ* counts neither of them. For an engine with steps of at most 512 tokens the same bound with "
        f"both is {limited.rate:.3f} requests/s for the whole trace, "
        f"{100 * limited.rate / free.rate:.0f} % of λ*.",
        "vLLM with the card's KV lies below the reference: our v0 keeps no watermark of free KV, so it "
        f"evicts more ({evictions:.0f} evictions).",
        f"Our slai, which defers decodes, serves {share(FULL, 'slai')} (unlimited KV) and "
        f"{share(MEMORY, 'slai')} with the card's KV; eb+ {share(FULL, 'eb+')} and {share(MEMORY, 'eb+')}.",
    )


def _terms() -> TileTerms:
    cost = engine_of(ChatJob("", "mixed", {})).cost
    assert isinstance(cost, TileCost)
    return cost.terms


def slowest_request(terms: TileTerms, longest: int) -> float:
    """T^max of theorem 2: a request of `longest` tokens, one token at a time and nothing batched."""
    return longest * (terms.per_column + terms.per_token) + float(decode_reads(terms, longest)[-1])


def cycle_requests(terms: TileTerms, bound: Bound, longest: int, spare: float) -> int:
    """The n of theorem 2: RAD with cycles of so many requests is stable at a load of (1 - spare) λ*.

    Its use is the proof: for chat traffic it is hundreds of thousands, where a thousand lose two percent.
    """
    if not 0 < spare < 1:
        raise InputError(f"spare={spare}; it is a share of the capacity, between 0 and 1")
    least = (terms.tile[1] - 1) * slowest_request(terms, longest) / (spare * bound.seconds)
    return floor(least) + 1
