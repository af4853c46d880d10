"""The coefficients of the linear law and of the work law, as a card holds them; pydantic fills them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from headgate.cost.model import Shape, Terms


@dataclass(frozen=True)
class DecodeTerms(Terms):
    """A step of decodes alone, in seconds.

    constant + per_decode * (decodes beyond free_decodes) + per_context * context.
    The paper's alpha_d and beta_d are `constant` and `per_decode`. We add two things it leaves out: the KV
    tokens read, which dominate at long contexts, and a number of decodes that ride for free, because small
    batches wait for the weights to be read whatever their size.
    """

    constant: float
    per_decode: float
    per_context: float = 0.0
    free_decodes: int = 0


@dataclass(frozen=True)
class PrefillTerms(Terms):
    """A step of prompt tokens alone, in seconds: constant + per_token * prefill + per_behind * behind.

    The paper's alpha_p and beta_p, and what earlier chunks of the same prompts cost, which it leaves out.
    """

    constant: float
    per_token: float
    per_behind: float = 0.0


@dataclass(frozen=True)
class MixedTerms(Terms):
    """A step with both, in seconds.

    The sum of constant, per_prefill * prefill, per_decode * (decodes beyond free_decodes),
    per_context * context, per_behind * behind, and a price per token that depends on the decode share
    r = decodes / (decodes + prefill): (a + b * r + c * r**2) * (decodes + prefill), where (a, b, c) is
    `by_share`, the paper's beta_MB(r), equations (10) and (11).

    Two of the three numbers in `by_share` may be negative, but a token more may never make a step shorter:
    the four conditions in `__post_init__` are the derivatives of that product at r = 0 and r = 1, and
    between those the derivatives are monotone. Together they also keep the product from being negative.
    """

    constant: float = 0.0
    per_prefill: float = 0.0
    per_decode: float = 0.0
    per_context: float = 0.0
    per_behind: float = 0.0
    free_decodes: int = 0
    by_share: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        a, b, c = self.by_share
        if not (isfinite(a) and isfinite(b) and isfinite(c)):
            raise ValueError(f"by_share must be three finite numbers, not {list(self.by_share)}")
        if min(a, a - c, a + b, a + b + c) < 0:
            raise ValueError(
                f"by_share {list(self.by_share)} would make a step shorter when a token is added; "
                "a, a - c, a + b and a + b + c must all be zero or more"
            )


@dataclass(frozen=True)
class WorkTerms(Terms):
    """The coefficients of `WorkCost`, in seconds; zero where a fit found nothing.

    GPU: a `constant`; `per_token` for the linear layers, which take tokens (decodes and prompt tokens) in
    whole `tile`s and never fewer than `least_tokens`, because the weights are read whatever the batch;
    `per_expert` for each expert of a layer that some token is sent to, of `experts` with `experts_per_token`
    drawn alike for each token (few tokens read few experts); `per_decode` for what only decodes cost (head,
    sampling); `per_context` for KV that is read, by decodes or behind prompts; `per_attention` for each pair
    of tokens of the same prompt, tokens * (start + tokens / 2) of a chunk; `per_prompt`; `prompt_constant`
    where there are prompts. What a mixed step costs beyond its work: `mixed_constant`, `mixed_per_context`,
    `mixed_per_decode`, and `per_meeting` for decodes * prefill / (decodes + prefill), the EB paper's
    r (1 - r) per token (equation 10).

    Host: `host_constant`, `host_prompts` where there are prompts, `host_per_request`, and `host_ungraphed`
    for steps of more tokens than the largest CUDA graph, `graph`, whose kernels are launched one by one. It
    works beside the GPU and shows only where it takes longer.

    `switch` is what the first decode step after a prefill-only step takes more, once per change of phase.
    """

    constant: float
    per_token: float
    per_decode: float = 0.0
    per_context: float = 0.0
    per_attention: float = 0.0
    per_prompt: float = 0.0
    prompt_constant: float = 0.0
    mixed_constant: float = 0.0
    mixed_per_context: float = 0.0
    mixed_per_decode: float = 0.0
    per_meeting: float = 0.0
    host_constant: float = 0.0
    host_prompts: float = 0.0
    host_per_request: float = 0.0
    host_ungraphed: float = 0.0
    switch: float = 0.0
    per_expert: float = 0.0
    least_tokens: int = 0
    tile: int = 1
    experts: int = 0
    experts_per_token: int = 0
    graph: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile < 1:
            raise ValueError(f"tile must be at least 1, not {self.tile}")
        if self.per_expert and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"per_expert needs experts, not {self.experts_per_token} of {self.experts}")


@dataclass(frozen=True)
class HostTerms(Terms):
    """Seconds in which a host books the tokens it has just seen, composes the next step and launches it.

    `constant` and `per_request` (decodes and prompts) in every step; `prompts` more where prompts are in it,
    or `ungraphed` more where its tokens are also more than the largest CUDA graph, `graph` (0: none is
    known): its kernels are then launched one by one. `sim/engine/asynchronous.py` says what follows.
    """

    constant: float
    per_request: float = 0.0
    prompts: float = 0.0
    ungraphed: float = 0.0
    graph: int = 0

    def seconds(self, shape: Shape, width: int = 1) -> float:
        """For a step of that shape with `width` tokens a decode; with chunks unknown, prompts count as one.

        Decodes alone are assumed to fit the graphs unless they verify drafts.
        """
        decodes, _, prefill, _, chunks = shape
        requests = decodes + (len(chunks) or bool(prefill))
        spent = self.constant + self.per_request * requests
        beyond = 0 < self.graph < decodes * width + prefill
        if not prefill:
            return spent + self.ungraphed if beyond and width > 1 else spent
        return spent + (self.ungraphed if beyond else self.prompts)


@dataclass(frozen=True)
class DraftTerms(Terms):
    """What speculative decoding takes beside the verification of 1 + `drafts` tokens a decode, in seconds.

    `draft` for each pass of the drafter and `draft_per_decode` for each decode in it, `drafts` passes a step;
    `speculating` for any step with drafts (rejection sampling, more work of the host). A card says the most
    drafts that were measured; an engine runs with as many or fewer. `method` is vLLM's.
    """

    drafts: int
    draft: float = 0.0
    draft_per_decode: float = 0.0
    speculating: float = 0.0
    method: str = "eagle"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafts < 1:
            raise ValueError(f"drafts must be at least 1, not {self.drafts}")
        if self.method not in LOOKAHEAD:
            raise ValueError(f"method must be one of {', '.join(LOOKAHEAD)}, not {self.method!r}")

    @property
    def ahead(self) -> int:
        """KV tokens that vLLM keeps for a decode beyond those it computes: its `num_lookahead_tokens`."""
        times, more = LOOKAHEAD[self.method]
        return times * self.drafts + more


# By method: times the drafts, and more
LOOKAHEAD = {"eagle": (1, 0), "mtp": (1, 0), "draft_model": (1, 0), "dflash": (1, 1), "ngram": (0, 0)}
