"""How requests are sorted into types, and thresholds by type, from the text a user writes."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.core.request import Request, uncached

BY_VALUE = ("prompt", "output")


class Sorting(NamedTuple):
    """By kind, by bounds of the prompt (what the prefix cache has of it left out) or of the predicted output,
    or not at all.
    """

    by: str
    bounds: tuple[int, ...] = ()

    @classmethod
    def read(cls, policy: str, text: str) -> Sorting:
        """From `kind`, `none`, `prompt:256/1024` or `output:50/200`."""
        by, _, rest = text.partition(":")
        if by in ("kind", "none") and not rest:
            return cls(by)
        if by in BY_VALUE and rest:
            return cls(by, _growing(policy, f"split={text}", rest, 1))
        raise InputError(
            f"{policy}: split={text!r} is unknown; choose kind, none, prompt:256/1024 or output:50/200"
        )

    def name(self, request: Request) -> str:
        """The type of a request: its kind, or the bound it keeps."""
        if self.by == "none":
            return ""
        if self.by == "kind":
            return request.kind
        value = uncached(request) if self.by == "prompt" else request.guess
        if value is None:
            return "unknown"
        return next((str(bound) for bound in self.bounds if value <= bound), "more")


def read_thresholds(policy: str, text: str) -> dict[str, tuple[float, ...]]:
    """`10`, `chat=2+code=0.5` or, by segment, `256=8/4+more=4/2`, as sizes by type; "" stands for all."""
    found: dict[str, tuple[float, ...]] = {}
    for part in filter(None, text.split("+")):
        name, _, sizes = part.rpartition("=")
        name = name.strip()
        if name in found:
            raise InputError(f"{policy}: thresholds={text!r}: two of type {name!r}; drop one")
        try:
            found[name] = tuple(float(size) for size in sizes.split("/"))
        except ValueError:
            raise InputError(
                f"{policy}: thresholds={text!r}: {part!r} is not a threshold; write 10, or "
                "chat=2+code=0.5, or 8/4/2 by segment"
            ) from None
        if not all(isfinite(size) and size > 0 for size in found[name]):
            raise InputError(f"{policy}: thresholds={text!r}: {part!r}: give finite numbers above 0")
    return found


def read_ends(policy: str, text: str) -> tuple[int, ...]:
    """`20/40/80/160` as numbers."""
    return _growing(policy, f"ends={text}", text, 0) if text else ()


def _growing(policy: str, where: str, text: str, least: int) -> tuple[int, ...]:
    try:
        bounds = tuple(int(bound) for bound in text.split("/"))
    except ValueError:
        raise InputError(f"{policy}: {where}: need whole numbers with / between, such as 20/40/80") from None
    if bounds[0] < least or any(x >= y for x, y in pairwise(bounds)):
        raise InputError(f"{policy}: {where}: need growing numbers from {least} on, such as 20/40/80")
    return bounds
