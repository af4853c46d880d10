"""What a prefix cache could find at most: prompt tokens that an earlier request had, in endless memory."""

from __future__ import annotations

import numpy as np

from headgate.core.ledger import Entry, Ledger
from headgate.core.view import Limits
from headgate.kv.prefix import PrefixBlocks
from headgate.workloads.columns import Whole
from headgate.workloads.workload import Workload

ENDLESS = 2**60  # blocks


def found_again(workload: Workload, block: int) -> Whole:
    """For each request the tokens that an endless cache has when requests come one after the other."""
    pieces = workload.pieces()
    found = np.zeros(len(workload), dtype=np.int64)
    if pieces is None:
        return found
    cache, ledger = PrefixBlocks(ENDLESS, block, lambda entry: 0), Ledger(Limits(1, 1, block), 0)
    lengths = zip(workload.prompt.tolist(), workload.output.tolist(), strict=True)
    for row, (prompt, output) in enumerate(lengths):
        hit, known = cache.find(pieces[row], prompt), prompt + output - 1
        cache.hold(Entry(ledger, row, 0.0, prompt, output), pieces[row], hit)
        cache.take(cache.of(known) - hit.blocks)
        cache.release(row, known, cache.of(known))
        found[row] = hit.blocks * block
    return found
