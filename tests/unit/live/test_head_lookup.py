"""The head of the queue is looked up by what could have changed: the same as a full look-up, step by step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.core.ledger import Entry, Ledger
from headgate.core.view import Limits
from headgate.kv.siblings import Siblings
from headgate.methods.eb.exclusive import Exclusive
from stub_engine import StubEngine
from stub_scheduler import plug_in

BLOCK, BLOCKS = 16, 6
PROMPT = BLOCK * BLOCKS + 1


class FullAttentionManager:
    block_size = BLOCK


class SlidingWindowManager(FullAttentionManager):
    pass


class Cache:
    """A prefix cache of few blocks; `asked` counts full look-ups."""

    def __init__(self, manager: type) -> None:
        self.hash_block_size = BLOCK
        self.found: dict[Any, Any] = {}
        self.single_type_managers = (manager(),)
        self.block_pool = self
        self.asked = 0

    def get_cached_block(self, hash: Any, groups: list[int]) -> list[Any] | None:
        block = self.found.get(hash)
        return None if block is None else [block]

    def find_longest_cache_hit(self, hashes: list[Any], most: int) -> tuple[tuple[list[Any]], int, int]:
        self.asked += 1
        blocks: list[Any] = []
        for hash in hashes[: most // BLOCK]:
            if hash not in self.found:
                break
            blocks.append(self.found[hash])
        return (blocks,), len(blocks) * BLOCK, 0

    def change(self, rng: random.Random) -> None:
        """A block comes, goes, or gets another number of holders."""
        hash = rng.randrange(BLOCKS)
        block = self.found.get(hash)
        if block is None:
            self.found[hash] = SimpleNamespace(block_hash=hash, ref_cnt=rng.randrange(2))
        elif rng.random() < 0.4:
            self.found.pop(hash).block_hash = None
        else:
            block.ref_cnt = rng.randrange(3)


def _entry(id: int) -> Entry:
    return Entry(Ledger(Limits(64, 4, BLOCK), 1024), id, 0.0, PROMPT, 8)


def _lookup(cache: Cache) -> Any:
    scheduler = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_cache_manager=SimpleNamespace(coordinator=cache),
        block_size=BLOCK,
    )
    return plug_in().request_map.Lookup(scheduler)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("manager", [FullAttentionManager, SlidingWindowManager])
def test_the_head_is_seen_as_by_a_full_look_up(seed, manager):
    rng, cache = random.Random(seed), Cache(manager)
    lookup, plain = _lookup(cache), _lookup(cache)
    requests = [
        SimpleNamespace(num_computed_tokens=0, num_tokens=PROMPT, block_hashes=[*range(BLOCKS)])
        for _ in range(2)
    ]
    pairs = [(_entry(id), _entry(id)) for id in range(2)]
    for _ in range(200):
        for _ in range(rng.randrange(3)):
            cache.change(rng)
        which = rng.random() < 0.1  # now and then another request is the next in turn
        (quick, full), request = pairs[which], requests[which]
        assert lookup.look_at_head(quick, request) == plain.look(full, request)
        assert (quick.hit, quick.loose, quick.todo, quick.cached) == (
            full.hit, full.loose, full.todo, full.cached,
        )  # fmt: skip


def test_a_head_that_did_not_change_costs_no_full_look_up():
    cache = Cache(FullAttentionManager)
    for hash in range(3):
        cache.found[hash] = SimpleNamespace(block_hash=hash, ref_cnt=1)
    lookup, entry = _lookup(cache), _entry(0)
    request = SimpleNamespace(num_computed_tokens=0, num_tokens=PROMPT, block_hashes=[*range(BLOCKS)])
    assert lookup.look_at_head(entry, request) and entry.hit == 3 * BLOCK
    assert not any(lookup.look_at_head(entry, request) for _ in range(5))
    assert cache.asked == 1
    cache.found[2].ref_cnt = 0  # its last holder has left
    assert lookup.look_at_head(entry, request) and entry.loose == BLOCK and cache.asked == 1


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_blocks_whose_hash_needs_the_tokens_behind_them(ahead):
    """From 0.33 on, where a drafter reads ahead: a whole block may have no hash yet."""
    cache = Cache(FullAttentionManager)
    cache.num_hash_lookahead_tokens = ahead
    lookup = _lookup(cache)
    for tokens in range(1, 3 * BLOCK + 5):
        hashes = [*range(max(0, tokens - ahead) // BLOCK)]
        entry = _entry(tokens)
        request = SimpleNamespace(num_computed_tokens=0, num_tokens=tokens, block_hashes=hashes)
        lookup.arrives(entry, request)
        lookup.look_at_head(entry, request)
        cache.found = {0: SimpleNamespace(block_hash=0, ref_cnt=1)}
        lookup.look_at_head(entry, request)
        assert entry.hit == BLOCK * bool(hashes)
        cache.found = {}
        lookup.siblings.drop(entry.id)


def _request(hashes: list[Any], **words: Any) -> Any:
    return SimpleNamespace(num_computed_tokens=0, num_tokens=PROMPT, block_hashes=hashes, **words)


def test_a_request_counts_on_what_those_before_it_will_compute():
    """Nothing is in the cache yet. What one that left would have computed, the next in turn computes."""
    lookup, names = _lookup(Cache(FullAttentionManager)), [*range(BLOCKS)]
    first, second, third, other = (_entry(id) for id in range(4))
    own, another = [*names[:4], "mine", "mine too"], [*names[:4], "its", "its too"]
    lookup.arrives(first, _request(names))
    lookup.arrives(second, _request(own))
    lookup.arrives(third, _request(another))
    lookup.arrives(other, _request([*map(str, names)]))
    assert [each.todo for each in (first, second, third, other)] == [97, 33, 33, 97]
    assert second.room == 33 and second.cached == 64
    lookup.siblings.admit(first.id)  # it runs: the blocks will be there, their memory is not taken yet
    assert lookup.look_at_head(second, _request(own)) and (second.todo, second.room) == (33, 97)
    lookup.siblings.drop(first.id)
    assert lookup.look_at_head(second, _request(own)) and (second.todo, second.cached) == (97, 0)
    assert third.todo == 33  # the second will have computed it


def test_one_that_was_evicted_is_counted_on_again_when_it_runs_again():
    """Its blocks were lost, and it computes them anew: those behind it need not."""
    lookup, names = _lookup(Cache(FullAttentionManager)), [*range(BLOCKS)]
    first, second = _entry(0), _entry(1)
    lookup.arrives(first, _request(names))
    lookup.arrives(second, _request(names))
    for _ in range(2):
        lookup.siblings.admit(first.id)
        lookup.look_at_head(second, _request(names))
        assert second.todo == 1
        lookup.siblings.withdraw(first.id)
        lookup.look_at_head(second, _request(names))
        assert second.todo == PROMPT
    lookup.siblings.drop(first.id)
    lookup.siblings.drop(second.id)
    assert not lookup.siblings._last and not lookup.siblings._root.children


def test_a_request_that_never_reads_the_cache_counts_on_nothing():
    lookup, names = _lookup(Cache(FullAttentionManager)), [*range(BLOCKS)]
    first, second, third = (_entry(id) for id in range(3))
    lookup.arrives(first, _request(names))
    lookup.arrives(second, _request(names, skip_reading_prefix_cache=True))
    lookup.siblings.drop(first.id)
    lookup.arrives(third, _request(names))  # the second writes what the third can read
    assert [second.todo, third.todo] == [97, 1]


class Looks:
    """Stands for the look-up: counts, and finds something or nothing."""

    def __init__(self, found_nothing: bool) -> None:
        self.found_nothing, self.asked, self.siblings = found_nothing, 0, Siblings()

    def arrives(self, entry: Entry, request: Any) -> None: ...

    def look_at_head(self, entry: Entry, request: Any) -> bool:
        self.asked += 1
        return False


@pytest.mark.parametrize("found_nothing", [True, False])
def test_decodes_alone_do_not_look_again_at_a_head_that_had_nothing(found_nothing):
    """It has a slot, and the policy lets it wait: what prompts, arrivals or departures bring is looked up."""
    engine = StubEngine(Exclusive(slots=8, refill=7))
    engine.books._lookup = looks = Looks(found_nothing)
    engine.add("first", 20, 60)
    engine.add("second", 20, 12)
    for _ in range(4):
        engine.step()
    engine.add("head", 20, 20)
    engine.step()
    before = looks.asked
    for _ in range(4):
        engine.step()
    assert looks.asked - before == (0 if found_nothing else 4)
    while "second" in engine.scheduler.requests:
        engine.step()
    before = looks.asked
    engine.step()
    assert looks.asked > before
