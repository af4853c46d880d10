"""The time of a step as a sum of the work in it, never less than what the host needs to launch it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.build import mypyc_attr
from headgate.cost.laws.linear import CompiledCost, LinearCost
from headgate.cost.laws.terms import DecodeTerms, DraftTerms, HostTerms, MixedTerms, PrefillTerms, WorkTerms
from headgate.cost.model import Chunk, Counts, Shape

__all__ = ["WorkCost", "WorkTerms", "experts_met"]

HOST = ("host_constant", "host_per_request", "host_prompts", "host_ungraphed")


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class WorkCost(CompiledCost):
    """The larger of GPU and host, each a sum of non-negative parts; the law that `fit` chooses from.

    More of anything never takes less time, a mixed step never less than either half, and nothing takes no
    time: all follow from the signs. `switch` is not part of a step's price; drivers add it to the first
    decode step after prompts ran alone. With chunks unknown, prompts count as one prompt.

    `host`, where it is known, is for drivers that follow an asynchronous engine step by step: they take the
    GPU's time from `unhosted` and reckon the host beside it.

    With `drafting` each decode computes 1 + drafts tokens in the linear layers, reads its KV once, and the
    drafter's passes come on top. The drafter's own prompts, weights and KV are not reckoned.
    """

    def __init__(
        self, terms: WorkTerms, host: HostTerms | None = None, drafting: DraftTerms | None = None
    ) -> None:
        self.terms = terms
        self.host = host
        self.drafting = drafting
        self.width = 1 + drafting.drafts if drafting else 1
        # What a step with decodes takes for drafts, and each of its decodes
        self._drafts = (0.0, 0.0)
        if drafting:
            fixed = drafting.drafts * drafting.draft + drafting.speculating
            self._drafts = (fixed, drafting.drafts * drafting.draft_per_decode)
        self.switch = terms.switch
        self.by_chunk = any(
            value > 0 for value in (terms.per_attention, terms.per_prompt, terms.host_per_request)
        )
        self._lines: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
        self._hosted = any(getattr(terms, name) > 0 for name in HOST)
        # Sums that every step would make again, in tuples: compiled code reads them without a look-up.
        self._prompts = (
            terms.constant + terms.prompt_constant,
            terms.per_context,
            terms.per_attention,
            terms.per_prompt,
        )
        self._mixed = (
            terms.mixed_constant,
            terms.per_decode + terms.mixed_per_decode,
            terms.per_context + terms.mixed_per_context,
            terms.per_meeting,
        )
        self._tiles = terms.tile, terms.least_tokens, terms.per_token

    def __repr__(self) -> str:
        return f"WorkCost({self.terms}, {self.drafting})" if self.drafting else f"WorkCost({self.terms})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkCost):
            return NotImplemented
        mine, theirs = (self.terms, self.host, self.drafting), (other.terms, other.host, other.drafting)
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.terms, self.host, self.drafting))

    def seconds(self, shape: Shape) -> float:
        decodes, context, prefill, behind, chunks = shape
        if not prefill:
            line = self._lines.get(decodes)
            if line is None:
                line = self.decode_line(decodes)
            spent = line[0] + line[1] * context
            least = self.decode_floor(decodes)
            return spent if spent > least else least
        pairs = 0.0
        parts = (chunks or (Chunk(behind, prefill),)) if self.by_chunk else ()
        for start, tokens, _ in parts:
            pairs += tokens * (start + tokens / 2)
        constant, per_behind, per_attention, per_prompt = self._prompts
        spent = (
            constant
            + self.layers(decodes * self.width + prefill)
            + per_behind * behind
            + per_attention * pairs
            + per_prompt * len(parts)
        )
        if decodes:
            constant, per_decode, per_context, per_meeting = self._mixed
            spent += (
                constant
                + per_decode * decodes
                + per_context * context
                + per_meeting * (decodes / (decodes + prefill)) * prefill
            )
            if self.drafting is not None:
                spent += self._drafts[0] + self._drafts[1] * decodes
        if not self._hosted:
            return spent
        requests = decodes + (len(parts) or 1)
        return max(spent, self.terms.host_prompts + self._launch(requests, decodes * self.width + prefill))

    def many(
        self, decodes: Counts, context: Counts, prefill: Counts, behind: Counts, prompts: Counts
    ) -> NDArray[np.float64]:
        terms = self.terms
        tokens = decodes * self.width + prefill
        some, both = prefill > 0, (prefill > 0) & (decodes > 0)
        parts = np.maximum(prompts, 1.0)
        whole = np.maximum(np.ceil(tokens / terms.tile) * terms.tile, terms.least_tokens)
        spent = terms.constant + terms.per_token * whole + terms.per_decode * decodes
        if terms.per_expert:
            spent = spent + terms.per_expert * experts_met(tokens, terms.experts, terms.experts_per_token)
        spent = spent + terms.per_context * (context + behind)
        pairs = prefill * (behind + prefill / 2) / parts
        spent = spent + some * (
            terms.prompt_constant + terms.per_attention * pairs + (terms.per_prompt * parts)
        )
        meeting = prefill * decodes / np.maximum(decodes + prefill, 1.0)
        spent = spent + both * (
            terms.mixed_constant
            + terms.mixed_per_decode * decodes
            + terms.mixed_per_context * context
            + terms.per_meeting * meeting
        )
        spent = spent + (decodes > 0) * (self._drafts[0] + self._drafts[1] * decodes)
        if not self._hosted:
            return np.asarray(spent, dtype=np.float64)
        launch = terms.host_constant + terms.host_per_request * (decodes + some * parts)
        launch = launch + some * terms.host_prompts
        if terms.graph:
            launch = launch + terms.host_ungraphed * (tokens > terms.graph)
        return np.asarray(np.maximum(spent, launch), dtype=np.float64)

    def decode_line(self, decodes: int) -> tuple[float, float]:
        line = self._lines.get(decodes)
        if line is None:
            terms = self.terms
            fixed = terms.constant + self.layers(decodes * self.width) + terms.per_decode * decodes
            if self.drafting is not None:
                fixed += self._drafts[0] + self._drafts[1] * decodes
            line = self._lines[decodes] = (fixed, terms.per_context)
        return line

    def decode_floor(self, decodes: int) -> float:
        if not (self._hosted and decodes):
            return 0.0
        return self._launch(decodes, decodes * self.width)

    def _launch(self, requests: int, tokens: int) -> float:
        terms = self.terms
        spent = terms.host_constant + terms.host_per_request * requests
        return spent + terms.host_ungraphed if 0 < terms.graph < tokens else spent

    def unhosted(self) -> WorkCost:
        nothing: dict[str, Any] = dict.fromkeys(HOST, 0.0)
        return WorkCost(replace(self.terms, **nothing), drafting=self.drafting)

    def speculating(self, drafting: DraftTerms | None) -> WorkCost:
        return WorkCost(self.terms, self.host, drafting)

    def graphed(self, tokens: int) -> WorkCost:
        """The same on an engine whose largest CUDA graph holds that many tokens.

        A card whose host was measured with graphs of one size knows what steps beyond them take, not from
        where on: that is a setting of the engine.
        """
        terms, host = self.terms, self.host
        if host is not None and host.graph:
            host = replace(host, graph=tokens)
        return WorkCost(replace(terms, graph=tokens) if terms.graph else terms, host, self.drafting)

    def below(self) -> LinearCost:
        """Straight lines that never cost more: no tiles, no host, no attention among prompt tokens."""
        terms = self.terms
        drafts, each = self._drafts
        decode, read = self.width * terms.per_token + terms.per_decode + each, terms.per_context
        prompts = terms.constant + terms.prompt_constant
        return LinearCost(
            DecodeTerms(terms.constant + drafts, decode, read),
            PrefillTerms(prompts, terms.per_token, read),
            MixedTerms(
                constant=prompts + terms.mixed_constant + drafts,
                per_prefill=terms.per_token,
                per_decode=decode + terms.mixed_per_decode,
                per_context=read + terms.mixed_per_context,
                per_behind=read,
            ),
        )

    def layers(self, tokens: int) -> float:
        """The linear layers: whole tiles, the reading of all weights, and of the experts that are met."""
        tile, least, per_token = self._tiles
        whole = -(-tokens // tile) * tile
        spent = per_token * (whole if whole > least else least)
        terms = self.terms
        if not terms.per_expert:
            return spent
        missed = (1 - terms.experts_per_token / terms.experts) ** tokens  # as `experts_met`, without arrays
        return spent + terms.per_expert * terms.experts * (1 - missed)


def experts_met(tokens: ArrayLike, experts: int, each: int) -> NDArray[np.float64]:
    """How many of a layer's experts that many tokens are sent to, on average, if all are equally likely."""
    met: NDArray[np.float64] = experts * (1 - (1 - each / experts) ** np.asarray(tokens, dtype=np.float64))
    return met
