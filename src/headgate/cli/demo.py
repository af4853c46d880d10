"""`headgate demo`: the five-minute experience."""

from __future__ import annotations

from typing import Annotated

import typer

from headgate.cli.output import run_folder
from headgate.cli.words import gather

POLICIES = ["mixed", "v0", "eb:refill=8", "eb:refill=32", "eb:refill=128"]
SCENES = {
    "as-recorded": ("at the rate it was recorded, 5.2 requests/s", {}),
    "saturated": ("as fast as the engine can: 1,024 clients in a closed loop", {"clients": 1024}),
}


def demo(
    out: Annotated[str | None, typer.Option(help="folder for the runs (default: runs/NNNN-demo)")] = None,
) -> None:
    """Ten minutes of real conversations on an H200, under several policies. No GPU needed.

    Serves a bundled slice of the Azure 2023 conversation trace with Qwen3-8B step times measured on an H200:
    mixed batching (vLLM's default), prefill-first (vLLM v0) and exclusive batches with three thresholds.
    """
    from headgate.cli.compare import choose, run_all
    from headgate.results.compare import compare
    from headgate.results.overview import overview_table
    from headgate.results.text import show
    from headgate.spec.run import Prepared

    with run_folder(out, "demo", overwrite=False) as folder:
        for scene, (load, flags) in SCENES.items():
            words = gather(None, None, {"trace": "azure-conv", "slots": 512, "budget": 16384, **flags}, None)
            prepared = Prepared(words)
            print(f"\n{len(prepared.workload)} conversations on {prepared.card.name}, {load}\n")
            runs = run_all(prepared, choose(POLICIES, prepared), 1, folder / scene)
            show(overview_table(compare(runs, POLICIES[0])))
    print(
        f"\nRun folders: {folder}. Every difference with its interval: headgate compare --trace azure-conv "
        "--clients 1024 --slots 512 --budget 16384 --policy mixed --policy eb:refill=32"
    )
