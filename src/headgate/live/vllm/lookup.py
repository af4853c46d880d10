"""What vLLM's prefix cache has of a request that waits, found without touching the cache."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from headgate.core.ledger import Entry


class Lookup:
    """The same question vLLM asks when it admits a request, asked earlier, so that policies can count on it.

    Only where one group of layers has all the KV and it is computed here: with several groups, or KV from
    elsewhere, a waiting request has all its prompt to do until vLLM admits it.
    """

    def __init__(self, scheduler: Any) -> None:
        one_group = len(scheduler.kv_cache_config.kv_cache_groups) == 1
        caches = bool(getattr(scheduler.cache_config, "enable_prefix_caching", False))
        elsewhere = getattr(scheduler, "connector", None) is not None
        self._coordinator: Any = None
        if one_group and caches and not elsewhere:
            self._coordinator = getattr(scheduler.kv_cache_manager, "coordinator", None)
        self._block = scheduler.block_size

    def look(self, entry: Entry, request: Request) -> bool:
        """Note what there is of it now; True: another number of tokens than before."""
        if self._coordinator is None or request.num_computed_tokens:
            return False
        if getattr(request, "skip_reading_prefix_cache", False):  # it wants logprobs of its prompt
            return False
        groups, hit, *_ = self._coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        loose = sum(not block.ref_cnt for block in groups[0]) * self._block
        if (hit, loose) == (entry.hit, entry.loose):
            return False
        entry.todo += entry.hit - hit
        entry.hit, entry.loose = hit, loose
        if not entry.evictions:
            entry.cached = hit
        return True
