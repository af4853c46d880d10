"""Which build of headgate runs, compiled by mypyc or plain Python, and the marks that the compiler reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**marks):
        """Only the compiler reads them."""
        return lambda kind: kind


__all__ = ["build_name", "compiled", "mypyc_attr", "quick"]

# quick(Shape, (1, 2)) is a NamedTuple without the Python function that its own constructor is.
quick: Final = tuple.__new__


def compiled() -> bool:
    from headgate.core import ledger

    return not str(ledger.__file__).endswith(".py")


def build_name() -> str:
    return "compiled" if compiled() else "pure Python"
