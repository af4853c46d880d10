"""About: what engine the steps were timed on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class About:
    """GPU, model, versions, settings and limits of the engine that was timed; all of it goes on the card."""

    name: str  # of the card
    gpu: str
    model: str
    kv_tokens: int
    max_model_len: int
    max_running: int
    max_batch_tokens: int
    block: int = 16
    versions: dict[str, str] = field(default_factory=dict)  # {"vllm": "0.26.0", "torch": ...}
    settings: dict[str, str] = field(default_factory=dict)  # flags of the engine that change step times
    model_shape: dict[str, int] = field(
        default_factory=dict
    )  # layers, hidden, heads, kv_heads, head_size, ...
    date: str = "unknown"
    source: str = "headgate calibrate"
