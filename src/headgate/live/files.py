"""How many files a server may open; which release of an engine is installed: read, not imported, which takes
up to a minute.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

FILES = 65_536  # that may be open, of a server process
WRITTEN = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)", re.MULTILINE)


def more_files() -> None:
    """As many open files as the system allows: every connection is one."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def package_folder(name: str) -> Path | None:
    spec = find_spec(name)
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None  # also where a folder of that name is no package
    return Path(spec.submodule_search_locations[0])


def package_version(name: str, folder: Path) -> str:
    """Or "unknown" where it does not say. The file goes first: builds for CPUs come under another name."""
    for file in (folder / "_version.py", folder / "version.py"):
        written = WRITTEN.search(file.read_text(encoding="utf-8")) if file.is_file() else None
        if written:
            return written[1]
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def release_numbers(text: str) -> tuple[int, ...]:
    """0.5.23.post1 as (0, 5, 23)."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


class Releases(NamedTuple):
    """Those of an engine that this package was tried with."""

    title: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    force: str  # what to do to try another

    @property
    def tried(self) -> str:
        return " to ".join(".".join(map(str, release)) for release in (self.oldest, self.newest))

    @property
    def remedy(self) -> str:
        return f"use {self.title} {self.tried} or a newer headgate, or {self.force} to try"

    def problem(self, release: str, changes: Sequence[str] = ()) -> str | None:
        """Why it cannot be used, in one line that names the `changes` and the remedy."""
        about = f"{self.title} {release}"
        if changes:
            return f"{about} has changed what headgate relies on: {'; '.join(changes)}; {self.remedy}"
        if () < release_numbers(release) < self.oldest:
            return f"{about} is older than those headgate knows ({self.tried}); {self.remedy}"
        return None

    def doubt(self, release: str) -> str | None:
        """What to know of one that is newer, or does not say its number."""
        if () < release_numbers(release)[: len(self.newest)] <= self.newest:
            return None
        return f"{self.title} {release} was not tested with this headgate ({self.tried} were)"
