"""HEADGATE_PURE=1: plain Python runs although compiled modules lie beside it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType


class SourcesOnly:
    """For `sys.meta_path`: finds modules of this package as Python files, never as compiled ones."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder` says; None where the other finders should look."""
        if not name.startswith("headgate."):
            return None
        finders = (FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES)) for folder in path or ())
        return next(filter(None, (finder.find_spec(name) for finder in finders)), None)
