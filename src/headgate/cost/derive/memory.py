"""How many KV tokens and requests a deployment holds."""

from __future__ import annotations

from headgate.core.errors import InputError
from headgate.cost.derive.step import Deployment

UTILISATION = 0.92  # vLLM's default from 0.22 on
WORKSPACE = 2.5e9  # bytes of activations and CUDA graphs on one GPU; 2.3 to 2.7 on the three calibrated cards
BLOCK = 16
SHORTEST = 256  # KV tokens of a request, at least, if all seats are to be taken
MOST_RUNNING = 1024  # decodes of the largest step that was ever compared with a measurement


def weight_bytes(at: Deployment) -> float:
    """On one GPU."""
    model = at.model
    ends = model.weights - model.body_weights  # embedding and head stay in bf16
    return (model.body_weights * model.bytes_per_weight + ends * 2) / at.gpus


def kv_tokens(at: Deployment, utilisation: float) -> int:
    """KV tokens that fit beside the weights, in whole blocks.

    KV heads fewer than GPUs are copied, so their bytes do not shrink further. Layers with a window are
    counted like the others.
    """
    model = at.model
    room = utilisation * at.gpu.memory - WORKSPACE - weight_bytes(at)
    each = 2 * model.bytes_per_kv * model.layers / at.pipeline * at.kv_heads * model.head_size
    tokens = int(room / each) // BLOCK * BLOCK
    if tokens < 16 * BLOCK:
        need = (weight_bytes(at) + WORKSPACE) / utilisation
        raise InputError(
            f"the weights leave no room for KV on {at.gpus} x {at.gpu.name}: {need / 1e9:.0f} GB needed on "
            f"each, {at.gpu.memory / 1e9:.0f} GB there; use more GPUs (--tp), fp8 weights or a larger GPU"
        )
    return tokens


def most_running(tokens: int) -> int:
    """Requests that may run at once: as many as hold a short context each, in multiples of 8."""
    return max(1, min(MOST_RUNNING, tokens // SHORTEST // 8 * 8))
