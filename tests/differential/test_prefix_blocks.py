"""The cache of runs against one that keeps every block: same hits, same evictions, same order."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headgate.core.ledger import Entry, Ledger
from headgate.core.view import Limits
from headgate.kv.prefix import PrefixBlocks
from headgate.kv.siblings import Chain, Siblings
from oracles.plain_prefix import PlainCache


class Both:
    """The same calls to both caches. A request decodes by itself: no tick is shared."""

    def __init__(self, total: int, size: int, random: Random) -> None:
        self.random, self.size = random, size
        self.fast = PrefixBlocks(total, size, lambda entry: self.computed[entry.id])
        self.plain = PlainCache(total, size)
        self.ledger = Ledger(Limits(64, 8, size), total * size)
        self.computed: dict[int, int] = {}  # tokens in KV, by request
        self.tokens: dict[int, list] = {}
        self.blocks: dict[int, list] = {}
        self.hits = self.cuts = 0

    def admit(self, id: int, pieces: list[tuple[int, int]], known: int) -> bool:
        tokens = written(pieces, known)
        found, theirs = self.fast.find(pieces, known), self.plain.find(tokens)
        assert found.blocks == len(theirs)
        assert found.loose == sum(not block.refs for block in theirs)
        need = self.fast.of(known) - found.blocks + found.loose
        assert (need <= self.fast.free) == self.plain.fits(theirs, known)
        if need > self.fast.free:
            return False
        entry = Entry(self.ledger, id, 0.0, known, 10**6)
        entry.admission = id
        self.fast.hold(entry, pieces, found)
        self.plain.touch(theirs)
        self.tokens[id] = written(pieces, 10**4)
        self.blocks[id] = theirs
        self.computed[id] = found.blocks * self.size
        self.hits += found.blocks
        return True

    def compute(self, id: int, count: int) -> bool:
        """So many tokens more; those of the prompt and of the output alike."""
        before, after = self.computed[id], self.computed[id] + count
        need = self.fast.of(after) - self.fast.of(before)
        if need > self.fast.free:
            return False
        self.fast.take(need)
        self.blocks[id] = self.blocks[id] + self.plain.take(need)
        self.computed[id] = after
        self.plain.learn(self.tokens[id][:after], self.blocks[id])
        return True

    def learn(self, id: int) -> None:
        self.fast.learn(id, self.computed[id])

    def leave(self, id: int) -> None:
        held = self.computed[id]
        self.fast.release(id, held, self.fast.of(held))
        del self.computed[id]
        self.plain.release(self.blocks.pop(id))

    def same(self) -> None:
        """Sizes, the queue block by block, and what a run promises."""
        fast, plain = self.fast, self.plain
        assert fast.free == len(plain.queue)
        assert fast.evicted == plain.evicted
        blank = sum(block.identity is None for block in plain.queue)
        assert fast.blank == blank and all(block.identity is None for block in plain.queue[:blank])
        runs, run = [], fast._queue._ring.after
        while run is not fast._queue._ring:
            runs.append(run)
            run = run.after
        assert fast.free == fast.blank + sum(run.hi - run.lo for run in runs)
        order = [(block, run.node) for run in runs for block in reversed(range(run.lo, run.hi))]
        assert [block for block, _ in order] == [
            len(b.identity) // self.size - 1 for b in plain.queue[blank:]
        ]
        assert not any(run.refs for run in runs)
        held = [id(block) for blocks in self.blocks.values() for block in blocks]
        assert fast.shared == len(held) - len(set(held))


def written(pieces: list[tuple[int, int]], known: int) -> list:
    """Tokens of that content; the last piece goes on."""
    tokens: list = []
    for key, count in pieces:
        tokens += [(key, place) for place in range(count)]
    key, count = pieces[-1]
    return (tokens + [(key, place) for place in range(count, known)])[:known]


def content(random: Random, id: int) -> list[tuple[int, int]]:
    """Few system prompts, few sessions, so that most share something; some outputs are private."""
    pieces = [(random.randrange(3), random.choice([3, 8, 12, 16, 21]))] if random.random() < 0.8 else []
    while random.random() < 0.5:
        pieces.append((random.randrange(10, 14), random.choice([1, 4, 6, 9, 16])))
    how = random.random()
    if how < 0.6:
        pieces.append((random.randrange(20, 23), random.choice([2, 10, 20, 33])))
    elif how < 0.8 or not pieces:
        pieces.append((-1 - id, random.choice([0, 5, 12]) if pieces else 11))
    return pieces


@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 4, 8]), total=st.sampled_from([8, 20, 60]))
def test_same_hits_and_evictions_as_block_by_block(seed, size, total):
    random = Random(seed)
    both, inside, gone, id = Both(total, size, random), [], [], 0
    for _ in range(120):
        what = random.random()
        if what < 0.35:
            again = gone.pop(random.randrange(len(gone))) if gone and random.random() < 0.3 else None
            number, pieces, known = again or (id, content(random, id), 0)
            known = known or max(1, sum(tokens for _, tokens in pieces))
            id += again is None
            if both.admit(number, pieces, known):
                inside.append((number, pieces))
                left = known - both.computed[number]
                if both.compute(number, random.randint(1, left)):
                    both.learn(number)
        elif what < 0.8 and inside:
            number, pieces = random.choice(inside)
            prompt = sum(tokens for _, tokens in pieces)
            shared = sum(pieces[-1][0] == others[-1][0] for _, others in inside) > 1
            if both.compute(number, 1) and (both.computed[number] <= prompt or shared):
                both.learn(number)  # outputs are entered later, when somebody looks
        elif inside:
            number, pieces = inside.pop(random.randrange(len(inside)))
            known = both.computed[number] + 1
            both.leave(number)
            if random.random() < 0.4:
                gone.append((number, pieces, max(known, sum(tokens for _, tokens in pieces))))
        both.same()


def begins_alike(ours: list, theirs: list, size: int) -> int:
    """Whole blocks from the first token on that two prompts have in common."""
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    return same // size


@given(seed=st.integers(0, 2**32), named=st.booleans())
def test_siblings_are_found_as_by_comparing_each_with_each(seed, named):
    """By the pieces of a content, or by a list with a hash of each block, as vLLM has them."""
    random = Random(seed)
    size, siblings = random.choice([1, 4, 16]), Siblings()
    here: dict[int, list] = {}
    admitted: set[int] = set()
    for id in range(60):
        pieces = [(random.randrange(2), random.choice([3, 16, 40])) for _ in range(random.randint(1, 4))]
        pieces = pieces if random.random() < 0.7 else [*pieces, (-1 - id, random.randint(0, 30))]
        tokens = written(pieces, random.randint(1, sum(length for _, length in pieces) or 1))
        if named:
            hashes = [hash(tuple(tokens[: end * size])) for end in range(1, len(tokens) // size + 1)]
            shared = siblings.add(id, hashes.__getitem__, len(hashes))
        else:
            chain = Chain(pieces, len(tokens), size)
            shared = siblings.add(id, chain.name, chain.blocks)
        assert shared == max([begins_alike(tokens, each, size) for each in here.values()], default=0)
        here[id] = tokens
        while here and random.random() < 0.6:
            one = random.choice(sorted(here))
            if random.random() < 0.5:
                siblings.admit(one)
                admitted.add(one)
            else:
                siblings.drop(one)
                admitted.discard(one)
                del here[one]
        for waits in here.keys() - admitted:
            alike = [begins_alike(here[waits], here[one], size) for one in admitted]
            assert siblings.held(waits) == max(alike, default=0)
    for id in here:
        siblings.drop(id)
    assert not siblings._last and not siblings._root.children and not siblings._admitted
