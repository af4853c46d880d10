"""Table 19 of the EB paper: two GPUs, mixed or EB+ on each, or one for prompts and one for outputs."""

from __future__ import annotations

from headgate.reproduce.published import CARDS, H200, MEASURED, RTX
from headgate.reproduce.published_split import TABLE19, WAYS19, Scene
from headgate.reproduce.report import Report, spread
from headgate.reproduce.serving import Options, Outcomes
from headgate.reproduce.split_runs import (
    GROUPS,
    ROUTER,
    SLOTS,
    SplitJob,
    better,
    enough,
    gain,
    load_of,
    same_best,
    sections,
)

NAME = "eb-table19"
ABOUT = "two GPUs: mixed, EB+, or one for prompts and one for outputs; tok/s, TTFT, TPOT"
ENGINES, REQUESTS = 2, 4000
SPLIT = "1P+1D"


def jobs(options: Options) -> list[SplitJob]:
    """Every load, way and card."""
    return [
        SplitJob(
            (card, scene, way),
            card,
            way,
            ENGINES,
            load_of(scene, enough(options, REQUESTS, scene.clients), (512, 256)),
        )
        for gpu, card in GROUPS
        for scene in TABLE19
        if scene.gpu == gpu
        for way in WAYS19
    ]


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Ratios and signs."""
    tables = sections(outcomes, TABLE19, WAYS19, (WAYS19,))
    return Report(
        NAME,
        "EB+ against disaggregation, two GPUs, Qwen3-8B",
        (
            f"Closed loop; {REQUESTS} requests of 512/256 tokens (uniform, +-50 %), {SLOTS} seats and 16384 tokens "
            f"a step on every engine. v1 and EB+: both engines serve whole requests, {ROUTER}. {SPLIT}: one engine "
            "does prompts only, the other outputs only, both run our mixed.",
            "KV is handed over in 2 ms and 147,456 bytes per token at 50 GB/s; the paper says neither. '-' is out of "
            "memory in the paper; here the KV of the decode engine fills up and requests wait.",
        ),
        tables,
        (
            same_best(outcomes, TABLE19, WAYS19),
            *(better(outcomes, TABLE19, WAYS19, "EB+", metric, 0.01) for metric in ("tok/s", "TTFT", "TPOT")),
            *(better(outcomes, TABLE19, WAYS19, SPLIT, metric, 0.01) for metric in ("tok/s", "TTFT", "TPOT")),
        ),
        _remarks(outcomes, tables),
    )


def _remarks(outcomes: Outcomes, tables: tuple[object, ...]) -> tuple[str, ...]:
    gains = {
        (gpu, clients): gain(outcomes, CARDS[gpu, "8B"], Scene(gpu, clients, "512/256"), "EB+")
        for gpu in (RTX, H200)
        for clients in (64, 512, 2048)
    }
    split = [
        gain(outcomes, card, Scene(gpu, clients, "512/256"), SPLIT)
        for gpu, card in GROUPS
        for clients in (64, 512)
    ]
    ours = [gain(outcomes, MEASURED, Scene(H200, clients, "512/256"), "EB+") for clients in (64, 512, 2048)]
    return (
        f"EB+ over v1 in tok/s at c = 64, 512, 2048: {_listed(gains, RTX)} on RTX PRO 6000 (published +1.9, +0.9, "
        f"+22.8 %), {_listed(gains, H200)} on H200 (+1.2, -0.4, +4.3 %), "
        f"{', '.join(f'{value:+.1f}' for value in ours)} % on our own H200 card. Gains need a full engine: two of them "
        "share the clients, so c = 512 is 256 each.",
        f"{SPLIT} serves {min(split):+.0f} to {max(split):+.0f} % of v1's tokens at c = 64 and 512 (published -23 to "
        "+1 %): the engine for prompts is idle while the other decodes all outputs with half of the fleet's memory.",
        "The published v1 at c = 512 on RTX PRO 6000 serves 21,526 tok/s on two engines, 10,763 each; Table 3 has "
        "8,330 on one at c = 512. With 256 clients per engine mixed batching is then faster than with 512, which the "
        "published mixed price does not give: our v1 there is a ratio apart.",
    )


def _listed(gains: dict[tuple[str, int], float], gpu: str) -> str:
    return ", ".join(f"{value:+.1f}" for (where, _), value in gains.items() if where == gpu) + " %"
