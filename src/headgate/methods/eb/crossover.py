"""Exclusive or mixed batches: the throughput of each, where they cross, and EB+'s rule."""

from __future__ import annotations

from math import inf, log1p
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.methods.eb.costs import Lengths, PhaseCosts, checked_costs, checked_lengths
from headgate.methods.eb.thresholds import base_share


class Comparison(NamedTuple):
    """Both sides of (7) and (8) for a workload: exclusive batches win where `gain` is positive."""

    gap: float  # left side, s/token: what a token costs more in a mixed batch, beta_MB(r) - beta_EB
    penalty: float  # right side times N, s/token: what exclusive batches lose on fixed costs
    pure: float  # beta_EB, s/token; margins are shares of it
    share: float  # theta_0 at one over the mean output

    def gain(self, running: float) -> float:
        """Left minus right, s/token, with that many requests in the engine."""
        if not running > 0:
            raise InputError(f"running={running}; need > 0, there must be running requests")
        return self.gap - self.penalty / running

    @property
    def exclusive_between(self) -> tuple[float, float]:
        """The batch sizes between which exclusive batches win; usually (N_x, inf); (inf, inf) is never.

        Where the penalty is negative they win at every size if the gap is not negative, else below N_x only.
        """
        if self.penalty > 0:
            return (self.penalty / self.gap if self.gap > 0 else inf, inf)
        if self.gap >= 0:
            return (0.0, inf) if self.gap > 0 or self.penalty < 0 else (inf, inf)
        return (0.0, self.penalty / self.gap)


def exclusive_throughput(costs: PhaseCosts, lengths: Lengths, slots: float, refill: float) -> float:
    """Requests per second of EB(k), equation (4); `refill` need not be whole.

    0 at k = N, where the fluid phase never ends. The paper's, with p0 = 1 / mu_O; prompts take one prefill
    iteration whatever their number (erratum E3).
    """
    _check(costs, lengths, slots)
    if not 0 < refill <= slots:
        raise InputError(f"refill={refill}, slots={slots}; need 0 < refill <= slots, choose k <= N")
    if refill == slots:
        return 0.0
    zeta = -log1p(-refill / slots)
    fixed = (costs.prefill_fixed + costs.decode_fixed * zeta * lengths.output) / refill
    return 1 / (fixed + costs.pure_per_token(lengths) * lengths.total)


def mixed_throughput(costs: PhaseCosts, lengths: Lengths, running: float) -> float:
    """Requests per second of mixed batching with `running` requests in every batch, section 3.6."""
    _check(costs, lengths, running)
    fixed = costs.mixed_fixed * (1 + lengths.output) / running
    return 1 / (fixed + costs.mixed_per_token(lengths.output / lengths.total) * lengths.total)


def compare(costs: PhaseCosts, lengths: Lengths) -> Comparison:
    """The terms of (7) and (8), with theta_0 at p0 = 1 / mu_O.

    There (alpha_p + alpha_d zeta mu_O) / theta_0 = alpha_d mu_O / (1 - theta_0), which we use: it has a value
    without fixed prefill cost too. The paper mixes a fitted p0 and mu_O (erratum E14). A polynomial fitted to
    throughputs already holds the fixed cost of mixed batches: set mixed_fixed = 0 with it (erratum E5).
    """
    _check(costs, lengths, 1)
    share = base_share(costs.overhead / lengths.output)
    decode = costs.decode_fixed * lengths.output / (1 - share)
    penalty = (decode - costs.mixed_fixed * (1 + lengths.output)) / lengths.total
    pure = costs.pure_per_token(lengths)
    return Comparison(costs.mixed_per_token(lengths.output / lengths.total) - pure, penalty, pure, share)


def wants_exclusive(gain: float, margin: float, exclusive: bool) -> bool:
    """EB+'s choice, rule (8) with hysteresis: change only if the other mode is better by more than `margin`.

    A negative margin favours exclusive batches, and so throughput: it enters at a small loss already and
    leaves at three times that loss. The paper's rule is one-sided, `gain > δ` with δ = 1e-5 s/token, at
    27,000 tok/s a quarter of the whole cost (erratum E6).
    """
    return gain >= margin - 2 * abs(margin) if exclusive else gain > margin


def _check(costs: PhaseCosts, lengths: Lengths, batch: float) -> None:
    checked_costs(costs)
    checked_lengths(lengths)
    if not batch > 0:
        raise InputError(f"a batch of {batch} requests; need > 0, give the seats or the mean number running")
