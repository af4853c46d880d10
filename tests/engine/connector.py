"""A KV connector that finds parts of prompts elsewhere, at once or after a few steps."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Load(NamedTuple):
    """KV on its way to these blocks."""

    name: str
    blocks: list[int]
    first: int
    count: int
    late: bool  # the request waits for it; otherwise it is there before the step runs


class RemoteKv(KVConnectorBase_V1):
    """The scheduler's half. `there` says how many tokens of whose prompt are elsewhere, and whether late."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.there: dict[str, tuple[int, bool]] = {}
        self._offered: dict[str, tuple[int, bool]] = {}
        self._loads: list[Load] = []

    def take(self) -> list[Load]:
        """What the newest step set going."""
        loads, self._loads = self._loads, []
        return loads

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, late = self.there.get(request.request_id, (0, False))
        more = min(tokens, request.num_prompt_tokens - 1) - num_computed_tokens
        if more <= 0:
            return 0, False
        self._offered[request.request_id] = num_computed_tokens, late
        return more, late

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first, late = self._offered[request.request_id]
            table = list(blocks.get_block_ids()[0])
            self._loads.append(Load(request.request_id, table, first, num_external_tokens, late))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
