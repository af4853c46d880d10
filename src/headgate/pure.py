"""HEADGATE_PURE=1: plain Python runs although compiled modules lie beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType

ROOT = __name__.partition(".")[0] + "."


class SourcesOnly:
    """Finds modules of this package as Python files, never as compiled ones."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder` says; None where the other finders should look."""
        if not name.startswith(ROOT):
            return None
        specs = (_finder(folder).find_spec(name) for folder in path or ())
        return next((spec for spec in specs if spec is not None), None)


@cache
def _finder(folder: str) -> FileFinder:
    return FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES))


def force() -> None:
    """From now on; what has been imported stays as it is."""
    if SourcesOnly not in sys.meta_path:
        sys.meta_path.insert(0, SourcesOnly)
