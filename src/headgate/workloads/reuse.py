"""What a prefix cache finds: prompt tokens that an earlier request had, in endless memory or in so much."""

from __future__ import annotations

import numpy as np

from headgate.core.ledger import Entry, Ledger
from headgate.core.view import Limits
from headgate.kv.prefix import PrefixBlocks
from headgate.workloads.columns import Whole
from headgate.workloads.workload import Workload

ENDLESS = 2**60  # blocks


def found_again(workload: Workload, block: int, blocks: int = ENDLESS) -> Whole:
    """For each request the tokens that a cache of so many blocks has when requests come one after the other.

    Where only hits are recorded, and not what requests share, they are as recorded.
    """
    pieces = workload.pieces()
    if pieces is None:
        return workload.cached
    found = np.zeros(len(workload), dtype=np.int64)
    cache, ledger = PrefixBlocks(blocks, block, lambda entry: 0), Ledger(Limits(1, 1, block), 0)
    lengths = zip(workload.prompt.tolist(), workload.output.tolist(), strict=True)
    for row, (prompt, output) in enumerate(lengths):
        hit, known = cache.find(pieces[row], prompt), min(prompt + output - 1, blocks * block)
        if prompt > known:
            continue  # no engine of that size takes it
        cache.hold(Entry(ledger, row, 0.0, prompt, output), pieces[row], hit)
        cache.take(cache.of(known) - hit.blocks)
        cache.release(row, known, cache.of(known))
        found[row] = hit.blocks * block
    return found
