"""A cost card: its coefficients, where they come from, its file, and names of cards and models."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headgate.core.errors import InputError, told_faults
from headgate.core.files import read_json, read_text
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.cost.laws.terms import DraftTerms, HostTerms
from headgate.cost.laws.tiles import TileCost, TileTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Shape

DERIVED_CARD = "derived:"  # what the name of a card begins with that is computed when it is asked for
MOST_BYTES = 1 << 24  # of a file
LAWS = ("coefficients", "tiles", "work")
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=10)]
Range = Annotated[tuple[int, int], Field(description="smallest and largest value measured")]


class _Part(BaseModel):
    """Unknown fields are mistakes, and what was read is not changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GridCell(_Part):
    label: Text
    steps: Count
    decodes: Range
    context: Range
    prefill: Range
    error: float | None = None  # signed, of the sum of its times, by a fit that had not seen it


class Number(_Part):
    value: float
    origin: Literal["measured", "published", "assumed"]
    source: Text


class ExpectedError(_Part):
    """How far a card that was not measured may be off, relative: nine steps in ten of a kind; rates."""

    decode: Share
    prefill: Share
    mixed: Share
    throughput: Share  # of saturated engines
    kv: Share | None = None  # of KV tokens
    source: Text  # what it was found from


class Provenance(_Part):
    source: Text  # the log, paper or report
    measured: Text  # how: what was run, what was timed, how it was fitted
    date: Text
    versions: dict[str, str]
    residuals: dict[str, dict[str, float]] = {}  # part of the data: figure: value; {} where none are known
    assumptions: list[str] = []  # numbers that were not measured
    extrapolated: list[str]  # where the card is used beyond its measurements
    settings: dict[str, str] | None = None  # flags of the engine that change step times
    model_shape: dict[str, int] | None = None  # layers, hidden, heads, ...: what a model must have in common
    intervals: dict[str, tuple[float, float]] | None = None  # coefficient: 95 %, by bootstrap over parts
    chosen: list[str] | None = None  # how the law was chosen, a line per law tried
    grid: list[GridCell] | None = None  # what was measured, cell by cell
    numbers: dict[str, Number] | None = None  # of a derived card: each with its origin


class Region(_Part):
    """What one step held while it was measured: decodes, KV tokens all of them read, prompt tokens.

    `behind` are the tokens that stood before those of its prompts; None: up to the card's longest request.
    """

    decodes: Range
    context: Range
    prefill: Range
    behind: Range | None = None

    def misses(self, shape: Shape) -> tuple[str, ...]:
        """The features of a step that lie outside; those the step does not have are not counted."""
        values = {"decodes": shape.decodes, "context": shape.context, "prefill": shape.prefill}
        bounds = {name: getattr(self, name) for name in values}
        return tuple(name for name, x in values.items() if x and not bounds[name][0] <= x <= bounds[name][1])

    @model_validator(mode="after")
    def _ordered(self) -> Region:
        for name in ("decodes", "context", "prefill"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} must be two numbers in order, zero or more, not [{low}, {high}]")
        return self


class Coefficients(_Part):
    decode: DecodeTerms
    prefill: PrefillTerms
    mixed: MixedTerms


class Card(_Part):
    """How long steps take on one GPU with one model, and the limits of the engine they were timed on."""

    name: Text
    gpu: Text
    model: Text
    description: Text
    kv_tokens: Count  # KV capacity to use by default
    block: Count = 16  # KV tokens per block
    max_model_len: Count
    max_running: Count  # the most requests the card is meant for
    max_batch_tokens: Count  # the most tokens in one step
    coefficients: Coefficients | None = None  # straight lines,
    tiles: TileTerms | None = None  # or whole tiles,
    work: WorkTerms | None = None  # or a sum of work, as `headgate calibrate` fits it: one of the three
    send: Annotated[float, Field(ge=0)] | None = None  # s a hand-over occupies the sending engine
    host: HostTerms | None = None  # what its host takes for a step, if asynchronous; beside `work` only
    speculation: DraftTerms | None = None  # what speculative decoding takes; beside `work` only
    region: Region
    expected_error: ExpectedError | None = None  # derived cards only
    provenance: Provenance

    @model_validator(mode="after")
    def _one_model(self) -> Card:
        if sum(getattr(self, law) is not None for law in LAWS) != 1:
            raise ValueError("a card has one of coefficients (straight lines), tiles and work; give one")
        for beside in ("host", "speculation"):
            if getattr(self, beside) is not None and self.work is None:
                raise ValueError(f"{beside} is allowed beside work only; drop it")
        return self

    @cached_property
    def cost(self) -> LinearCost | TileCost | WorkCost:
        """The cost object; one per card, so its cache is shared."""
        if self.work is not None:
            return WorkCost(self.work, self.host)
        if self.tiles is not None:
            return TileCost(self.tiles)
        assert self.coefficients is not None
        terms = self.coefficients
        return LinearCost(terms.decode, terms.prefill, terms.mixed)

    @property
    def tensor_parallel(self) -> int:
        setting = (self.provenance.settings or {}).get("tensor parallel", "1")
        return int(setting) if setting.isdigit() else 1

    def text(self) -> str:
        document = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.text(), encoding="utf-8")


def list_cards() -> list[str]:
    return sorted(entry.name[:-5] for entry in _shipped().iterdir() if entry.name.endswith(".json"))


def load_card(card: str | Path) -> Card:
    """A card by built-in name, derived:MODEL@GPU, or by path (anything that ends in .json or holds a slash).

    Examples:
        >>> import headgate
        >>> card = headgate.load_card("cal-h200-qwen3-8b")
        >>> card.gpu, card.model
        ('NVIDIA H200', 'Qwen3-8B')
    """
    text = str(card)
    if text.startswith(DERIVED_CARD):
        from headgate.cost.derive.derived_card import card_named  # which reads cards itself

        return card_named(text)
    if isinstance(card, Path) or text.endswith(".json") or "/" in text:
        remedy = "give a readable file or one of the built-in names"
        return parse_card(read_text(text, "card file", remedy, MOST_BYTES), text)
    known = list_cards()
    if text not in known:
        near = nearest(text, known)
        remedy = f"did you mean {near!r}?" if near else f"choose from: {', '.join(known)};"
        raise InputError(f"unknown card {text!r}; {remedy} headgate card list shows all")
    return parse_card((_shipped() / f"{text}.json").read_text(encoding="utf-8"), text)


def parse_card(text: str, where: str) -> Card:
    read_json(text, f"card {where}", "see docs/cards.md")
    try:
        return Card.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(f"card {where}: {told_faults(error.errors(include_url=False), _fields)}") from None


def _shipped() -> Traversable:
    return files("headgate") / "cards"


def _fields(parent: tuple[int | str, ...]) -> list[str]:
    kind: Any = Card
    for part in parent:
        kind = get_args(kind)[1] if get_origin(kind) is dict else kind.model_fields[str(part)].annotation
        if isinstance(kind, UnionType):  # something or None
            kind = get_args(kind)[0]
    return list(getattr(kind, "model_fields", None) or kind.__dataclass_fields__)


# -- names of models

# Families whose names say what they are; of other names nothing is concluded
FAMILIES = (
    *("qwen", "llama", "mistral", "mixtral", "gemma", "phi", "deepseek", "falcon", "olmo", "glm", "granite"),
    *("opt", "kimi", "minimax", "nemotron", "command", "dolly", "gpt-oss", "yi"),
)
# Under which name vLLM loads the models of cards; of tuned variants the one that chats
OWNERS = {
    "meta-llama": "Llama-3.2-1B-Instruct Llama-3.2-3B-Instruct Llama-3.1-8B-Instruct Llama-3.1-70B-Instruct "
    "Llama-3.3-70B-Instruct Llama-3.1-405B-Instruct",
    "Qwen": "Qwen3-0.6B Qwen3-1.7B Qwen3-4B Qwen3-8B Qwen3-14B Qwen3-32B Qwen3-30B-A3B Qwen3-235B-A22B",
    "mistralai": "Mistral-7B-Instruct-v0.3 Mistral-7B-Instruct-v0.2 Mistral-Small-24B-Instruct-2501 "
    "Mixtral-8x7B-Instruct-v0.1 Mixtral-8x22B-Instruct-v0.1",
    "google": "gemma-2-9b-it gemma-2-27b-it gemma-3-4b-it gemma-3-12b-it gemma-3-27b-it",
}
_TUNED = re.compile(r"-(it|instruct(-v0\.[13]|-2501)?)$")
_LOADED = [(owner, name) for owner, names in OWNERS.items() for name in names.split()]
HUB = {_TUNED.sub("", name.lower()): f"{owner}/{name}" for owner, name in _LOADED}
_SIZE = re.compile(r"(?<![a-z0-9.])([0-9]+(?:\.[0-9]+)?)b(?![a-z0-9])")
_FAMILY = re.compile(
    rf"(?<![a-z])({'|'.join(map(re.escape, FAMILIES))})-?([0-9]+(?:\.[0-9]+)?(?![0-9.]*b))?(?![a-z])"
)


def differ(one: str, other: str) -> bool:
    """Whether both names tell, and do not tell the same model."""
    first, second = _told(one), _told(other)
    return any(a and b and a != b for a, b in zip(first, second, strict=True))


def hub_name(model: str) -> str | None:
    """What vLLM loads it as: a name with an owner as it is, any other as the table has it; else None."""
    if "/" in model:
        return model
    by_name = {name.rpartition("/")[2].lower(): name for name in HUB.values()} | HUB
    return by_name.get(model.lower())


def nearest(name: str, known: list[str]) -> str | None:
    """The known name that is spelt most like it, never one of another model."""
    alike = [other for other in known if not differ(name, other)]
    return next(iter(get_close_matches(name.lower(), alike, n=1, cutoff=0.5)), None)


def _told(name: str) -> tuple[str, str, str]:
    """Family, generation, size; each "" where the name does not say."""
    text = name.lower().rstrip("/")
    text = text.rpartition("/")[2] if "/" in text else text
    family, size = _FAMILY.search(text), _SIZE.search(text)
    return (family[1] if family else "", (family[2] or "") if family else "", size[1] if size else "")
