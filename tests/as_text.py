"""A document as a terminal without colours shows it."""

from __future__ import annotations

from io import StringIO

from headgate.report.terminal import Part, show


def as_text(part: Part) -> str:
    buffer = StringIO()
    show(part, buffer)
    return buffer.getvalue()
