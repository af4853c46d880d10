"""How many KV tokens and requests a deployment holds."""

from __future__ import annotations

from headgate.core.errors import InputError
from headgate.cost.derive.step import Deployment

UTILISATION = 0.92  # vLLM's default from 0.22 on
WORKSPACE = 2.5e9  # bytes of activations and CUDA graphs on one GPU; 2.3 to 2.7 on the three calibrated cards
BLOCK = 16
WORKSPACE_OFF = 1.5e9  # bytes by which that was off at most on eight engines: studies/cards/derived.py
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
    room = utilisation * at.gpu.memory - WORKSPACE - weight_bytes(at)
    tokens = int(room / _kv_bytes(at)) // BLOCK * BLOCK
    if tokens < 16 * BLOCK:
        need = (weight_bytes(at) + WORKSPACE) / utilisation
        raise InputError(
            f"the weights leave no room for KV on {at.gpus} x {at.gpu.name}: {need / 1e9:.0f} GB needed on "
            f"each, {at.gpu.memory / 1e9:.0f} GB there; use more GPUs (--tp), fp8 weights or a larger GPU"
        )
    return tokens


def kv_error(at: Deployment, tokens: int) -> float:
    """Relative error of those KV tokens if the workspace is off as far as it ever was."""
    return min(1.0, WORKSPACE_OFF / (tokens * _kv_bytes(at)))


def most_running(tokens: int) -> int:
    """Requests that may run at once: vLLM takes any `max_num_seqs` for which every request has a block."""
    return min(MOST_RUNNING, tokens // BLOCK)


def _kv_bytes(at: Deployment) -> float:
    """Of one token on one GPU."""
    model = at.model
    return 2 * model.bytes_per_kv * model.layers / at.pipeline * at.kv_heads * model.head_size
