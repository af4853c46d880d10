"""The gate's books: a summary for operators, and every invariant that can be checked from them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from headgate.live.route.ticket import State

if TYPE_CHECKING:
    from headgate.live.route.gate_guard import GuardedRouter


def summary(gate: GuardedRouter) -> dict[str, Any]:
    """Who is where, by class and engine, and what went wrong so far. Everything in it is JSON."""
    roster, desk = gate.roster, gate.desk
    return {
        "router": type(gate.router).__name__,
        "fallen": gate.fallen,
        "queued": {kind: len(queue) for kind, queue in roster.queues.items()},
        "handed_over": len(roster.handoff),
        "engines": {
            id: {
                "role": roster.replicas[id].role,
                "up": state.up,
                "room": list(roster.replicas[id].room),
                "prompts": roster.replicas[id].prompts,
                "decodes": roster.replicas[id].decodes,
            }
            for id, state in desk.engines.items()
        },
        "retiring": {id: roster.replicas[id].load for id in roster.retired if roster.replicas[id].load},
        "counts": dict(gate.counts),
        "refused": dict(gate.refused),
        "gauges": gate.gauges() if gate.fallen is None else {},
    }


def faults(gate: GuardedRouter) -> list[str]:
    """Every invariant that does not hold: one place for each request, and counters that agree with them."""
    roster, found = gate.roster, []
    for ticket in gate.tickets.values():
        queued = ticket.id in roster.waiting and ticket.id in roster.queues[ticket.kind]
        stay = roster.places.get(ticket.id)
        between = ticket.id in roster.handoff
        is_there = {
            State.QUEUED: queued and stay is None and not between,
            State.PREFILLING: bool(stay and not stay.decoding and not between and not queued),
            State.HANDED_OVER: bool(stay and not stay.decoding and between and not queued),
            State.DECODING: bool(stay and stay.decoding and not between and not queued),
        }
        if not is_there.get(ticket.state, False):
            found.append(f"{ticket} is not where it says: queued={queued}, place={stay}, between={between}")
        elif stay is not None and stay.replica != ticket.engine:
            found.append(f"{ticket} is on engine {stay.replica}")
    here = len(roster.waiting) + len(roster.places)
    if here != len(gate.tickets):
        found.append(f"{here} requests in the roster, {len(gate.tickets)} in the gate")
    return found + _engine_faults(gate)


def _engine_faults(gate: GuardedRouter) -> list[str]:
    """Counters of every engine against those who are on it."""
    roster, found = gate.roster, []
    prompts: Counter[tuple[int, str]] = Counter()
    decodes: Counter[tuple[int, str]] = Counter()
    for id, stay in roster.places.items():
        if id not in roster.handoff:
            (decodes if stay.decoding else prompts)[stay.replica, stay.request.kind] += 1
    for seat in roster.replicas:
        for name, counted, said in (
            ("prompts", prompts, seat.prefilling),
            ("decodes", decodes, seat.decoding),
        ):
            wrong = {kind: n for kind, n in said.items() if n != counted[seat.id, kind]}
            if wrong:
                found.append(f"engine {seat.id}: {name} {wrong} are not there")
        if seat.prompts != sum(seat.prefilling.values()) or seat.decodes != sum(seat.decoding.values()):
            found.append(f"{seat} does not add up")
    for kind, number in roster.prefilling.items():
        if number != sum(seat.prefilling[kind] for seat in roster.replicas):
            found.append(f"class {kind!r}: {number} prompts in the fleet do not add up")
    if roster.free_seats != sum(seat.seats for seat in roster.replicas):
        found.append(f"{roster.free_seats} free seats do not add up")
    return found
