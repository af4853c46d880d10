"""A step of an engine by the laws of its operators, and what the engine loses against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from headgate.cost.derive.gpus import UNGRAPHED, Gpu
from headgate.cost.derive.transformer import Transformer
from headgate.cost.model import Chunk

STREAM = 0.8  # of the memory's speed, for what is read and written element by element
HAND_OVER = 10e-6  # seconds to pass a batch from one stage of a pipeline to the next, and its bytes
SCALES = (1.0, 1.0, 1.0, 14e-6, 0.4e-3)  # of the fields, for a search
MOST = (3.0, 3.0, 3.0, 200e-6, 20e-3)


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs: `tensor` GPUs share every matrix, with `whole_experts` each has whole experts instead.

    `pipeline` stages run one after the other; the step is that of one batch in flight.
    """

    model: Transformer
    gpu: Gpu
    tensor: int = 1
    pipeline: int = 1
    whole_experts: bool = False
    fp8: bool = False  # products at the GPU's fp8 speed
    graph: int = 0  # tokens of the largest CUDA graph; 0: any step has one

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def kv_heads(self) -> float:
        """On one GPU; fewer heads than GPUs are copied."""
        return max(1.0, self.model.kv_heads / self.tensor)

    @property
    def peak(self) -> float:
        return 2 * self.gpu.peak if self.fp8 else self.gpu.peak


@dataclass(frozen=True)
class Corrections:
    """What an engine loses against operators timed alone, from a calibrated card.

    `compute` stretches matrix products, `kv` the reading of KV, `mixed` that reading beside prompts again.
    `per_layer` and `constant` are seconds for what has no law: norms, rotations, gaps between kernels.
    """

    compute: float = 1.0
    kv: float = 1.0
    mixed: float = 1.0
    per_layer: float = 14e-6
    constant: float = 0.04e-3


OF_H200 = Corrections(1.18, 0.955, 1.32)  # from cal-h200-qwen3-8b
NONE = Corrections()


def step_seconds(
    at: Deployment, decodes: int, context: int, chunks: Sequence[Chunk] = (), lost: Corrections = OF_H200
) -> float:
    """GPU time of a step: decodes that read `context` tokens together, and pieces of prompts.

    Not linear in the context, so simulations get a card distilled from it instead.
    """
    model = at.model
    prompt = sum(chunk.tokens for chunk in chunks)
    tokens, sampled = decodes + prompt, decodes + sum(chunk.last for chunk in chunks)
    alike = _matrices_and_sums(at, tokens, lost) + lost.per_layer
    inner = model.feed_forward / at.tensor
    dense = _gated(at, tokens, inner, lost) if model.layers > model.expert_layers else 0.0
    routed = _experts(at, tokens, lost) if model.expert_layers else 0.0
    full, near = model.full_layers, model.layers - model.full_layers
    attention = full * _attention(at, decodes, context, chunks, lost)
    if near:
        attention += near * _attention(at, decodes, context, chunks, lost, model.window)
    head = gemm(at.gpu, sampled, model.vocabulary / at.tensor, model.hidden, lost.compute)
    words = 12 * sampled * model.vocabulary / at.tensor / (STREAM * at.gpu.bandwidth)
    nets = (model.layers - model.expert_layers) * dense + model.expert_layers * routed
    spent = model.layers * alike + nets + attention + head + words + lost.constant
    if at.pipeline > 1:
        link = next(iter(at.gpu.links.values())).speed
        spent += (at.pipeline - 1) * (HAND_OVER + 2 * tokens * model.hidden / link)
    return spent


def _matrices_and_sums(at: Deployment, tokens: int, lost: Corrections) -> float:
    model, head = at.model, at.model.head_size
    heads, keys = model.heads / at.tensor, at.kv_heads
    spent = _gemm(at, tokens, (heads + 2 * keys) * head, model.hidden, lost)
    spent += _gemm(at, tokens, model.hidden, heads * head, lost)
    spent += 2 * tokens * (8 * model.hidden + 4 * (heads + 2 * keys) * head) / (STREAM * at.gpu.bandwidth)
    graphed = not at.graph or tokens <= at.graph
    return spent + 2 * all_reduce(at.gpu, tokens * model.hidden, at.tensor, graphed)


def _gated(at: Deployment, tokens: int, inner: float, lost: Corrections) -> float:
    hidden = at.model.hidden
    spent = _gemm(at, tokens, 2 * inner, hidden, lost) + _gemm(at, tokens, hidden, inner, lost)
    return spent + 2 * tokens * 3 * inner / (STREAM * at.gpu.bandwidth)


def _experts(at: Deployment, tokens: int, lost: Corrections) -> float:
    model, gpu, law = at.model, at.gpu, at.gpu.experts
    experts, each, hidden = model.experts, model.experts_per_token, model.hidden
    share = at.tensor if at.whole_experts else 1  # GPUs that have whole ones
    inner = model.expert_feed_forward * share / at.tensor
    spent = gemm(gpu, tokens, experts, hidden, lost.compute)
    met = experts * (1 - (1 - each / experts) ** tokens) / share  # those read: tokens draw experts alike
    sent = tokens * each / share
    read = met * 3 * model.bytes_per_weight * hidden * inner + 4 * sent * hidden
    work = 6 * (sent + law.pad * met) * hidden * inner * lost.compute
    spent += law.c0 + joined(read / (gpu.bandwidth * law.eb), work / (at.peak * law.ef), law.q)
    around = 3 * each * inner / share
    spent += 2 * tokens * around / (STREAM * gpu.bandwidth)
    shared = model.shared_feed_forward / at.tensor
    return spent + (_gated(at, tokens, shared, lost) if shared else 0.0)


def _attention(
    at: Deployment,
    decodes: int,
    context: float,
    chunks: Sequence[Chunk],
    lost: Corrections,
    window: float = inf,
) -> float:
    """Of one layer in which no token reads more than `window` others."""
    model, gpu, spent = at.model, at.gpu, 0.0
    if decodes:
        kv = lost.kv * (lost.mixed if chunks else 1.0)
        of_token = 2 * model.bytes_per_kv * at.kv_heads * model.head_size
        read = of_token * min(context, decodes * window) * kv / (gpu.bandwidth * gpu.decode.e)
        spent = gpu.decode.c0 + joined(gpu.decode.c1 * decodes * at.kv_heads, read, gpu.decode.q)
    if chunks:
        tokens = sum(chunk.tokens for chunk in chunks)
        pairs = sum(_pairs(chunk, window) for chunk in chunks)
        heads, law = model.heads / at.tensor, gpu.prompt
        spent += law.c0 + law.c1 * tokens * heads + 4 * heads * model.head_size * pairs / (gpu.peak * law.e)
    return spent


def _pairs(chunk: Chunk, window: float) -> float:
    """The tokens before each token of the piece, summed; of each at most the window."""
    start, end = chunk.start, chunk.start + chunk.tokens
    near = min(max(start, window), end)  # from here on the window is full
    return (near - start) * (start + near) / 2 + (end - near) * min(window, end)


def _gemm(at: Deployment, tokens: int, rows: float, columns: float, lost: Corrections) -> float:
    return gemm(at.gpu, tokens, rows, columns, lost.compute, at.model.bytes_per_weight, at.peak)


# -- seconds of one operator on a GPU


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


def all_reduce(gpu: Gpu, elements: float, count: int, graphed: bool = True) -> float:
    if count == 1:
        return 0.0
    law = gpu.links[count]
    return (law.c0 if graphed else UNGRAPHED) + 2 * (count - 1) / count * 2 * elements / law.speed
