"""The family of laws a card may follow: features of a step, and which of them a law has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from headgate.cost.fit.steps import DECODE, MIXED, PREFILL, Floats, Rows, StepTable
from headgate.cost.laws.work import HOST, WorkTerms, experts_met

Column = Callable[[StepTable], Floats]


def _mixed(table: StepTable) -> Floats:
    return np.asarray(table.kind == MIXED, dtype=np.float64)


# What may be added to the affine law, by the name of its coefficient in WorkTerms; none may be negative.
EXTRAS: Mapping[str, Column] = {
    "per_context": lambda table: table.context + table.behind,
    "per_attention": lambda table: table.attention,
    "prompt_constant": lambda table: (table.prefill > 0).astype(np.float64),
    "per_prompt": lambda table: table.prompts,
    "mixed_constant": _mixed,
    "mixed_per_context": lambda table: _mixed(table) * table.context,
    "mixed_per_decode": lambda table: _mixed(table) * table.decodes,
    "per_meeting": lambda table: table.decodes * table.prefill / table.tokens,
    "switch": lambda table: ((table.kind == DECODE) & (table.before == PREFILL)).astype(np.float64),
}
PER_EXPERT = "per_expert"  # the one extra that needs to know the model
AFFINE = ("constant", "per_token", "per_decode")
LEAST_TOKENS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 384)  # tried for the reading of the weights
SMALL = 32  # decodes
TILES = (8, 16, 32, 64, 128, 256)
MEANING = {
    "constant": "per step",
    "per_token": "per token, decodes and prompts",
    "per_decode": "per decode, beyond a token",
    "per_context": "per KV token read",
    "per_attention": "per pair of prompt tokens",
    "prompt_constant": "per step with prompts",
    "per_prompt": "per prompt",
    "mixed_constant": "per mixed step",
    "mixed_per_context": "per KV token read in a mixed step, more",
    "mixed_per_decode": "per decode in a mixed step, more",
    "per_meeting": "per decode x prompt token / tokens, mixed",
    "switch": "first decode step after prompts alone",
    "per_expert": "per expert met in a layer",
    "host_constant": "host, per step",
    "host_per_request": "host, per request",
    "host_prompts": "host, per step with prompts",
    "host_ungraphed": "host, per step beyond the largest graph",
}


@dataclass(frozen=True)
class Law:
    """Which features a law has: a member of the family, without its coefficients."""

    extras: tuple[str, ...] = ()
    least_tokens: int = 0
    tile: int = 1
    host: bool = False
    experts: tuple[int, int] = (0, 0)  # of a layer, and those each token is sent to
    graph: int = 0  # tokens of the largest CUDA graph, 0 where none is known

    @property
    def names(self) -> tuple[str, ...]:
        """Its coefficients, in the order of the unknowns."""
        return (*AFFINE, *self.extras, *(HOST if self.host else ()))

    @property
    def outside(self) -> Rows:
        """Which GPU columns come on top of whichever takes longer: the change of phase."""
        return np.array([name == "switch" for name in (*AFFINE, *self.extras)])

    @property
    def size(self) -> int:
        return len(self.names) + (self.least_tokens > 0) + (self.tile > 1)

    def terms(self, found: Floats) -> WorkTerms:
        values = {name: float(f"{value:.6g}") for name, value in zip(self.names, found, strict=True)}
        experts, each = self.experts if PER_EXPERT in self.extras else (0, 0)
        return WorkTerms(
            **values,
            least_tokens=self.least_tokens,
            tile=self.tile,
            experts=experts,
            experts_per_token=each,
            graph=self.graph if self.host else 0,
        )


def charged_tokens(table: StepTable, law: Law) -> Floats:
    """Tokens the linear layers are charged for: whole tiles, and not fewer than the weights' reading."""
    found: Floats = np.maximum(np.ceil(table.tokens / law.tile) * law.tile, law.least_tokens)
    return found


def gpu_columns(table: StepTable, law: Law) -> Floats:
    """One row per step, one column per GPU coefficient of the law."""
    columns = [np.ones(len(table)), charged_tokens(table, law), table.decodes]
    for name in law.extras:
        known = name != PER_EXPERT
        columns.append(EXTRAS[name](table) if known else experts_met(table.tokens, *law.experts))
    return np.column_stack(columns)


def host_columns(table: StepTable, graph: int) -> Floats:
    """The same for the host's coefficients; `graph` is the largest CUDA graph, 0 where none is known."""
    prompting = table.prefill > 0
    prompts = np.where(np.isnan(table.prompts), prompting, table.prompts)
    ungraphed = (table.tokens > graph) & (graph > 0)
    return np.column_stack((np.ones(len(table)), table.decodes + prompts, prompting, ungraphed))


def longer(law: Law, gpu: Floats, host: Floats, found: Floats) -> Floats:
    """Seconds of rows with these columns: GPU or host, whichever takes longer, and the change of phase."""
    own = found[: gpu.shape[1]]
    spent: Floats = gpu @ np.where(law.outside, 0.0, own)
    if law.host:
        spent = np.maximum(spent, host @ found[gpu.shape[1] :])
    return spent + gpu @ np.where(law.outside, own, 0.0)


def seconds(terms: WorkTerms, table: StepTable) -> Floats:
    """What a law says of each row, the change of phase included."""
    extras = tuple(name for name in (*EXTRAS, PER_EXPERT) if getattr(terms, name) > 0)
    experts = (terms.experts, terms.experts_per_token)
    law = Law(extras, terms.least_tokens, terms.tile, True, experts, terms.graph)
    found = np.array([getattr(terms, name) for name in law.names])
    return longer(law, gpu_columns(table, law), host_columns(table, terms.graph), found)


def offered(table: StepTable) -> tuple[str, ...]:
    """Extras the table can identify: known in every row, and present in more than one part."""
    columns = {name: column(table) for name, column in EXTRAS.items()}
    finite = {name: values for name, values in columns.items() if np.isfinite(values).all()}
    return tuple(name for name, values in finite.items() if _in_two_parts(table, values > 0))


def host_can_show(table: StepTable) -> bool:
    """Were small batches timed, in two parts? Only there can host and GPU be separated."""
    return _in_two_parts(table, (table.kind == DECODE) & (table.decodes <= SMALL))


def offered_floors(table: StepTable) -> tuple[int, ...]:
    """Numbers of tokens that may be the least charged for: half as many decodes were timed, in two parts.

    Without them a floor would be a guess about batches that were not timed.
    """
    alone = table.kind == DECODE
    below = {least: alone & (table.tokens <= least / 2) for least in LEAST_TOKENS}
    return tuple(least for least, rows in below.items() if _in_two_parts(table, rows))


def _in_two_parts(table: StepTable, rows: Rows) -> bool:
    """Whether these rows are of two parts at least, or of the only one there is."""
    return len(np.unique(table.part[rows])) >= min(2, len(np.unique(table.part)))
