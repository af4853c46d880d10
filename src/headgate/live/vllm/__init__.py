"""The scheduler plug-in for vLLM."""

from __future__ import annotations

import logging

from headgate.live.engine.process import LOG, EngineNames

VLLM = EngineNames(
    name="vllm",
    title="vLLM",
    slots="max_num_seqs",
    budget="max_num_batched_tokens",
    longest="max_model_len",
    plug_ins="vLLM's plug-ins (VLLM_PLUGINS)",
    priorities="--scheduling-policy priority",
)
# A child of vLLM's logger: its handlers, format and level hold.
LOG.logger = logging.getLogger("vllm.headgate")
