"""What vLLM's prefix cache has of a request that waits, found without touching the cache."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from vllm.v1.request import Request

from headgate.core.build import quick
from headgate.core.ledger import Entry
from headgate.kv.siblings import Siblings

GROUP = [0]  # the only one
NO_BLOCKS: list[Any] = []
HASH: Callable[[Any], object] = attrgetter("block_hash")  # of a block; None when it was evicted
HOLDERS: Callable[[Any], int] = attrgetter("ref_cnt")


class Found(NamedTuple):
    """What a look-up found of a request, and what would change it."""

    request: Request
    tokens: int  # of the request
    hit: int
    blocks: list[Any]
    hashes: list[object]  # theirs
    miss: Any  # hash of the first block that is not there; None: all are


class Lookup:
    """The same question vLLM asks when it admits a request, asked earlier, so that policies can count on it.

    vLLM enters a block into the cache when the step that computes it is composed, so the requests of a group
    find in the same step what the first of them brings. Whoever waits counts on that, too (`Siblings`).
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
        self._pool = _chained(self._coordinator, self._block)
        self._siblings = Siblings()
        self._head: Found | None = None  # of the next in turn

    @property
    def found_nothing(self) -> bool:
        """Was nothing of the next in turn in the cache?"""
        head = self._head
        return head is not None and not head.blocks

    def look_at_head(self, entry: Entry, request: Request) -> bool:
        """As `look`, of the request that is asked for at every step: as long as its first missing block stays
        away, only the blocks that were found can have changed.
        """
        coordinator, head = self._coordinator, self._head
        if coordinator is None or request.num_computed_tokens:
            return False
        if (
            head is None
            or head.request is not request
            or head.tokens != request.num_tokens
            or (head.miss is not None and self._pool.get_cached_block(head.miss, GROUP))
        ):
            return self._look_anew(entry, request)
        loose = 0
        if head.blocks:
            if [*map(HASH, head.blocks)] != head.hashes:
                return self._look_anew(entry, request)
            loose = [*map(HOLDERS, head.blocks)].count(0) * self._block
        return entry.expect(head.hit, loose, self._siblings.held(entry.id) * self._block)

    def _look_anew(self, entry: Entry, request: Request) -> bool:
        self._head = None
        if _never_reads(request):
            return False
        hit, loose = self._look(request, remember=self._pool is not None)
        return entry.expect(hit, loose, self._siblings.held(entry.id) * self._block)

    def look(self, entry: Entry, request: Request) -> bool:
        """Note what there is of it now, or will be when those that run have done their prompts; True: another
        number of tokens than before.
        """
        if self._coordinator is None or request.num_computed_tokens or _never_reads(request):
            return False
        hit, loose = self._look(request, remember=False)
        return entry.expect(hit, loose, self._siblings.held(entry.id) * self._block)

    def arrives(self, entry: Entry, request: Request) -> None:
        """As `look`, and it counts on what it shares with those before it, even if they wait, too."""
        if self._coordinator is None or request.num_computed_tokens:
            return
        shared = 0
        if self._pool is not None:
            names = request.block_hashes[: request.num_tokens // self._block]  # the list itself may be cut
            shared = self._siblings.add(entry.id, names.__getitem__, len(names)) * self._block
        if not _never_reads(request):
            hit, loose = self._look(request, remember=False)
            entry.expect(hit, loose, shared, arrives=True)

    def admitted(self, entry: Entry) -> None:
        """It has a seat: what it has in common with others will be in the cache."""
        self._siblings.seat(entry.id)

    def evicted(self, entry: Entry) -> None:
        """Its KV was dropped: what it has in common with others will be there when it has a seat again."""
        self._siblings.unseat(entry.id)

    def gone(self, entry: Entry) -> None:
        """It has left, or cannot run for now."""
        self._siblings.drop(entry.id)

    def _look(self, request: Request, remember: bool) -> tuple[int, int]:
        """Tokens that are in the cache, and those of them in blocks that no request holds."""
        hit = loose = 0
        if self._pool is None or self._has_first(request):
            groups, hit, *_ = self._coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )
            blocks = groups[0]
            loose = [*map(HOLDERS, blocks)].count(0) * self._block
            if remember:
                self._head = self._found(request, blocks, hit)
        elif remember:
            tokens = request.num_tokens
            miss = request.block_hashes[0] if tokens > self._block else None
            self._head = quick(Found, (request, tokens, 0, NO_BLOCKS, NO_BLOCKS, miss))
        return hit, loose

    def _has_first(self, request: Request) -> bool:
        """Is its first block in the cache? Without it no other counts."""
        if request.num_tokens <= self._block:
            return False
        return bool(self._pool.get_cached_block(request.block_hashes[0], GROUP))

    def _found(self, request: Request, blocks: list[Any], hit: int) -> Found | None:
        """What to remember; None where more than the first missing block decides."""
        place, miss = len(blocks), None
        if place < (request.num_tokens - 1) // self._block:
            miss = request.block_hashes[place]
        if hit != place * self._block or (miss is not None and self._pool.get_cached_block(miss, GROUP)):
            return None
        return Found(request, request.num_tokens, hit, blocks, [*map(HASH, blocks)], miss)


def _never_reads(request: Request) -> bool:
    """Does it compute all its prompt, for logprobs of it?"""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def _chained(coordinator: Any, block: int) -> Any:
    """The pool of blocks, where a block counts only if all before it are there, and each has one hash.

    Not so with a sliding window, or with hashes of parts of blocks.
    """
    managers: Any = getattr(coordinator, "single_type_managers", ())
    pool = getattr(coordinator, "block_pool", None)
    if [type(each).__name__ for each in managers] != ["FullAttentionManager"]:
        return None
    return pool if getattr(pool, "hash_block_size", None) == managers[0].block_size == block else None
