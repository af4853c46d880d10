"""HTML and SVG elements as text in which everything that is not markup is escaped."""

from __future__ import annotations

import json
from html import escape
from typing import Any

VOID = frozenset({"meta", "br", "hr", "input"})


class Markup(str):
    """Text that is already markup."""

    __slots__ = ()


def tag(element: str, /, *children: str | None, **attributes: object) -> Markup:
    """An element. Children that are not markup are escaped; None, as child or attribute, is left out.

    An underscore at the end of an attribute's name is dropped (`class_`), the others become dashes.
    """
    words = [element]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening if element in VOID else f"{opening}{join(*children)}</{element}>")


def join(*parts: str | None) -> Markup:
    """Parts one after the other, escaped where they are not markup."""
    return Markup(
        "".join(part if isinstance(part, Markup) else escape(part, quote=False) for part in parts if part)
    )


def position(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def embedded(data: Any) -> Markup:
    """JSON that is safe inside a script element, whatever a label says."""
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return Markup(plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _attribute(value: object) -> str:
    return position(value) if isinstance(value, float) else str(value)
