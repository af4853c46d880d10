"""Requests drawn one by one become conversations: turns that repeat what was said, behind shared prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.view import Limits
from headgate.kv.prefix import PrefixBlocks
from headgate.workloads.streams import stream
from headgate.workloads.workload import LONGEST, PRIVATE, Contents, Piece, Whole, Workload


class SharedPrefix(NamedTuple):
    """System prompts of one class: each request begins with one of several `different` ones."""

    tokens: int
    different: int = 1


@dataclass
class Talk:
    left: int  # turns to come
    when: float  # the newest came
    system: list[Piece]
    key: int
    said: int = 0  # tokens by the user and the model


def shared_prefix(text: str) -> SharedPrefix:
    tokens, _, count = text.partition(":")
    if not (tokens.isdecimal() and (count or "1").isdecimal()) or not int(tokens) or not int(count or "1"):
        raise InputError(f"shared prefix {text!r}: give TOKENS or TOKENS:COUNT, such as 2048:20")
    if int(tokens) > LONGEST:
        raise InputError(f"shared prefix {text!r}: a prefix has at most {LONGEST} tokens")
    return SharedPrefix(int(tokens), int(count or "1"))


def as_sessions(
    workload: Workload, *, seed: int = 0, turns: float = 1.0, think: float = 0.0,
    prefixes: Sequence[SharedPrefix | None] = (None,),
) -> Workload:  # fmt: skip
    """The drawn requests as turns of conversations.

    A drawn prompt is what the user adds in a turn. A turn's prompt is the system prompt, all turns before it
    with their outputs, and what is added. The number of turns is geometric with mean `turns`; a conversation
    begins when its first request was drawn to arrive, and each next turn comes an exponential time of mean
    `think` after the one before arrived (an open loop: slow answers do not hold users up).
    `prefixes` are the system prompts of each class.
    """
    if workload.closed and turns > 1:
        raise InputError(
            "--turns needs arrival times; give --rate instead of --clients (advise does not take --turns)"
        )
    if not 1 <= turns < np.inf:
        raise InputError(f"--turns {turns:g}: a conversation has at least 1 turn")
    draw = stream(seed, "sessions")
    added, outputs, times = workload.prompt.tolist(), workload.output.tolist(), workload.arrival.tolist()
    systems = np.cumsum([0, *(prefix.different if prefix else 0 for prefix in prefixes)]).tolist()
    sessions, rows = systems[-1], list[list[Piece]]()
    talks: dict[int, Talk] = {}  # the one under way in each class
    for row, kind in enumerate(workload.kind.tolist()):
        talk = talks.get(kind)
        if talk is None or not talk.left:
            prefix, system = prefixes[kind], list[Piece]()
            if prefix:
                system.append((systems[kind] + int(draw.integers(prefix.different)), prefix.tokens))
            left = int(draw.geometric(1 / turns))
            talk = talks[kind] = Talk(left, times[row], system, sessions if turns > 1 else PRIVATE)
            sessions += turns > 1
        else:
            talk.when += float(draw.exponential(think)) if think else 0.0
        rows.append([*talk.system, (talk.key, talk.said + added[row])])
        talk.said += added[row] + outputs[row]
        talk.left -= 1
        times[row] = talk.when
    prompts = [sum(tokens for _, tokens in row) for row in rows]
    if max(prompts) > LONGEST:
        raise InputError("conversations grow beyond any length; give fewer --turns or shorter lengths")
    order = np.argsort(times, kind="stable")
    columns = {name: values[order] for name, values in workload.columns().items()}
    columns |= {"prompt": np.array(prompts)[order], "arrival": np.array(times)[order]}
    described = {"turns": turns, "think": think, "prefixes": [list(prefix or ()) for prefix in prefixes]}
    return replace(
        workload,
        **columns,  # type: ignore[arg-type]
        contents=Contents.of(rows).subset(order),
        origin={**workload.origin, "sessions": described},
    )


# -- what a prefix cache finds

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
