"""How long one operator takes on a GPU, in seconds: matrix products, attention, experts, all-reduce."""

from __future__ import annotations

from headgate.cost.derive.gpus import UNGRAPHED, Gpu


def joined(first: float, second: float, q: float) -> float:
    """Between the longer of two and their sum: the larger q, the nearer to the longer."""
    largest = max(first, second)
    if largest == 0.0:
        return 0.0
    return float(largest * ((first / largest) ** q + (second / largest) ** q) ** (1 / q))


def gemm(
    gpu: Gpu, m: int, n: float, k: float, compute: float = 1.0, weight_bytes: float = 2.0, peak: float = 0.0
) -> float:
    """M tokens times an n x k matrix; tokens are computed in tiles of 16."""
    law = gpu.gemm
    read = (weight_bytes * n * k + 2 * (m * k + m * n)) / (gpu.bandwidth * law.eb)
    work = 2 * 16 * -(-m // 16) * n * k * compute / ((peak or gpu.peak) * law.ef)
    return law.c0 + joined(read, work, law.q)


def decode_attention(
    gpu: Gpu, decodes: int, context: float, kv_heads: float, head: int, kv: float = 1.0, kv_bytes: float = 2.0
) -> float:
    """Decodes that read `context` tokens together; `kv` stretches the reading."""
    if not decodes:
        return 0.0
    law = gpu.decode
    read = 2 * kv_bytes * kv_heads * head * context * kv / (gpu.bandwidth * law.e)
    return law.c0 + joined(law.c1 * decodes * kv_heads, read, law.q)


def prompt_attention(gpu: Gpu, tokens: int, pairs: float, heads: float, head: int) -> float:
    """Prompt tokens with `pairs`, the sum of tokens * (start + tokens / 2) over pieces of prompts."""
    if not tokens:
        return 0.0
    law = gpu.prompt
    return law.c0 + law.c1 * tokens * heads + 4 * heads * head * pairs / (gpu.peak * law.e)


def routed_experts(
    gpu: Gpu,
    tokens: int,
    of: tuple[int, int, int],
    sizes: tuple[int, float],
    compute: float = 1.0,
    weight_bytes: float = 2.0,
    peak: float = 0.0,
) -> float:
    """The experts of a layer: (experts, each token's, GPUs that share them whole), (hidden, inner).

    Tokens draw experts alike, so `met` of them are read.
    """
    experts, each, share = of
    hidden, inner = sizes
    law = gpu.experts
    met = experts * (1 - (1 - each / experts) ** tokens) / share
    sent = tokens * each / share
    read = (met * 3 * weight_bytes * hidden * inner + 4 * sent * hidden) / (gpu.bandwidth * law.eb)
    work = 6 * (sent + law.pad * met) * hidden * inner * compute / ((peak or gpu.peak) * law.ef)
    return law.c0 + joined(read, work, law.q)


def all_reduce(gpu: Gpu, elements: float, count: int, graphed: bool = True) -> float:
    """A sum of bf16 over that many GPUs; nothing for one."""
    if count == 1:
        return 0.0
    law = gpu.links[count]
    return (law.c0 if graphed else UNGRAPHED) + 2 * (count - 1) / count * 2 * elements / law.speed
