"""The largest CUDA graph that vLLM should capture where gaps between tokens are promised."""

from __future__ import annotations

from headgate.advisor.flags import Flag

FLAG = "--max-cudagraph-capture-size"
LARGEST, MULTIPLE = 4096, 16  # the largest size measured; vLLM captures every 16 tokens
WHY = (
    "steps with prompts then run from CUDA graphs; vLLM's own limit is 512 tokens. On an H200 a launch "
    "beyond it took the host 40 ms, from a graph 15 ms or less, and single launches of 100 ms made gaps "
    "late. Graphs up to 4,096 tokens took 27 s more at the start and 1.6 GiB."
)


def graph_flag(budget: int) -> Flag:
    """For steps of up to `budget` tokens."""
    return Flag(FLAG, min(-(-budget // MULTIPLE) * MULTIPLE, LARGEST), WHY)
