"""The whole plan of EB for a workload: seats that fit in memory, and the refill threshold for them."""

from __future__ import annotations

from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.estimators.hazard import LinearHazard
from headgate.estimators.survival import Survival
from headgate.methods.eb.batch_size import paper_slots, safe_slots
from headgate.methods.eb.costs import Lengths, PhaseCosts, checked_costs, checked_lengths
from headgate.methods.eb.stationary import stationary_share
from headgate.methods.eb.thresholds import Threshold, paper_share, settle


class Seats(NamedTuple):
    """What bounds the seats: KV `capacity` in tokens, `most` of them, and no fewer than `least`."""

    capacity: float
    most: int
    least: int = 1
    miss: float = 0.01  # epsilon, the accepted share of cycles that overflow
    block: int = 0  # KV tokens per block; 0 counts tokens


def stationary_plan(costs: PhaseCosts, lengths: Lengths, survival: Survival, seats: Seats) -> Threshold:
    """Mode "stationary" of section 4.2, our default: the steady-state share, and seats that are safe."""
    share = stationary_share(survival, checked_costs(costs).overhead).share
    return settle(share, _safe(settle(share, _checked(seats).most).share, lengths, seats))


def paper_plan(
    costs: PhaseCosts, lengths: Lengths, hazard: LinearHazard, seats: Seats, previous: int | None = None
) -> Threshold:
    """Mode "paper" of section 4.2, Algorithm 1 with the guards its public code has: (3), (5) and (6).

    Give a `guarded` hazard. The correction (5) contains the number of seats, which follows from the share;
    the paper uses that of the review before, `previous`, else the most.
    """
    slots = _checked(seats).most if previous is None else previous
    share = paper_share(checked_costs(costs).overhead, hazard, costs.load(slots))
    clipped = settle(share, slots).share
    if clipped >= 1:  # one seat: no other request to wait for
        return settle(share, 1)
    bound = paper_slots(clipped, hazard.base, checked_lengths(lengths).prompt, seats.capacity, seats.miss)
    return settle(share, min(max(bound.overflow, 1, seats.least), seats.most))


def _safe(share: float, lengths: Lengths, seats: Seats) -> int:
    checked_lengths(lengths)
    if share >= 1:  # one seat, as above
        return 1
    return safe_slots(
        share,
        1 / lengths.output,
        lengths.prompt,
        lengths.prompt_sd,
        seats.capacity,
        miss=seats.miss,
        block=seats.block,
        least=seats.least,
        most=seats.most,
    ).slots


def _checked(seats: Seats) -> Seats:
    if not 1 <= seats.least <= seats.most:
        raise InputError(f"least={seats.least}, most={seats.most} seats; need 1 <= least <= most")
    return seats
