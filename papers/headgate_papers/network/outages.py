"""Engines of a stochastic network that fail, and what becomes of the requests on them."""

from __future__ import annotations

from math import inf

from headgate.core.roster import Member, Roster
from headgate_papers.network.counts import HANDOFF, MIXED, PREFILLING, SOLO, WAITING, Counts
from headgate_papers.network.job import DECODING, WAITS_PROMPT, Clock, Job

LOST = {PREFILLING: "lost_prompts", HANDOFF: "lost_handoffs", MIXED: "lost_mixed", SOLO: "lost_solo"}


def lose_all(fleet: Roster, books: Counts, clock: Clock, member: Member, now: float) -> list[Job]:
    """The requests that lose their engine or their KV, newest first; in the books they wait again."""
    mixed = member.prompts > 0
    found: list[Job] = []
    for id, stay in fleet.places.items():
        if stay.replica != member.id:
            continue
        job = stay.request
        assert isinstance(job, Job)  # the roster holds what it was given
        decodes = MIXED if mixed else SOLO
        level = HANDOFF if id in fleet.handoff else decodes if job.state == DECODING else PREFILLING
        books.counts[LOST[level]][job.number] += 1
        books.counts["waiting_again"][job.number] += 1
        books.move(level, WAITING, job.number, now)
        job.state = WAITS_PROMPT
        found.append(job)
    clock.ends.clear()
    clock.due = inf
    return sorted(found, key=lambda job: -job.id)
