"""Straight lines: a step's time is a sum of features, with its own coefficients for each of three regimes."""

from __future__ import annotations

from abc import abstractmethod

from headgate.core.build import mypyc_attr
from headgate.cost.laws.terms import DecodeTerms, MixedTerms, PrefillTerms
from headgate.cost.model import Shape, StepCost

__all__ = ["DecodeTerms", "LinearCost", "MixedTerms", "PrefillTerms"]


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class CompiledCost(StepCost):
    """A `StepCost` for which drivers need not go through Python's calls."""

    @abstractmethod
    def seconds(self, shape: Shape) -> float:
        """One step of any shape."""

    @abstractmethod
    def decode_line(self, decodes: int) -> tuple[float, float]:
        """(fixed, per_context) of a decode-only step of that many."""


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class LinearCost(CompiledCost):
    """A step's duration as a sum of non-negative features, with its own numbers for each of three regimes.

    Regimes: decodes only, prompts only, both. Rules that hold for every choice of coefficients:

    - never negative, and never shorter when any one of decodes, context, prefill or behind grows;
    - a step of nothing takes no time (an engine with nothing to run does not run);
    - a mixed step is never shorter than the longer of its two halves run alone. We need this floor where the
      paper does not: with the published polynomials, which are reciprocals of throughput and so already
      contain the constant (the mixed constant is then zero), one decode with ten prompt tokens
      would cost next to nothing, less than the decode alone.

    Continuity between regimes is not forced: the first prompt token that joins a decode batch may cost a
    jump. With the published 8B card on H200 it does (15 ms at 512 decodes), because a throughput measured on
    whole runs is spread over the steps; ours, fitted per step, jumps by milliseconds.
    """

    def __init__(self, decode: DecodeTerms, prefill: PrefillTerms, mixed: MixedTerms) -> None:
        self.decode = decode
        self.prefill = prefill
        self.mixed = mixed
        self._mixed = (  # a tuple unpacks faster than seven attributes; a simulation asks millions of times
            mixed.constant,
            mixed.per_prefill,
            mixed.per_decode,
            mixed.per_context,
            mixed.per_behind,
            mixed.free_decodes,
            mixed.by_share,
        )
        self._prefill = prefill.constant, prefill.per_token, prefill.per_behind
        self._lines: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}

    def __repr__(self) -> str:
        return f"LinearCost({self.decode}, {self.prefill}, {self.mixed})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LinearCost):
            return NotImplemented
        return (self.decode, self.prefill, self.mixed) == (other.decode, other.prefill, other.mixed)

    def __hash__(self) -> int:
        return hash((self.decode, self.prefill, self.mixed))

    def seconds(self, shape: Shape) -> float:
        decodes, context, prefill, behind, _ = shape
        if not prefill:
            line = self._lines.get(decodes)
            if line is None:
                line = self.decode_line(decodes)
            return line[0] + line[1] * context
        constant, per_token, per_behind = self._prefill
        alone = constant + per_token * prefill + per_behind * behind
        if not decodes:
            return alone
        line = self._lines.get(decodes)
        if line is None:
            line = self.decode_line(decodes)
        decoding = line[0] + line[1] * context
        if decoding > alone:
            alone = decoding
        constant, per_prefill, per_decode, per_context, per_behind, free_decodes, (a, b, c) = self._mixed
        tokens = decodes + prefill
        share = decodes / tokens
        paid = decodes - free_decodes if decodes > free_decodes else 0
        together = (
            constant
            + per_prefill * prefill
            + per_decode * paid
            + per_context * context
            + per_behind * behind
            + (a + share * (b + share * c)) * tokens
        )
        return together if together > alone else alone

    def decode_line(self, decodes: int) -> tuple[float, float]:
        line = self._lines.get(decodes)
        if line is None:
            terms = self.decode
            paid = max(decodes - terms.free_decodes, 0)
            line = self._lines[decodes] = (terms.constant + terms.per_decode * paid, terms.per_context)
        return line
