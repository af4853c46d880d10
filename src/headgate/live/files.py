"""Files an operator names, read without trusting them: a FIFO would hang the reader, a huge file stall it.

And which release of an engine is installed: read, not imported, which takes up to a minute.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

MOST_BYTES = 1 << 20  # of a settings file
MOST_CARD_BYTES = 1 << 24
FILES = 65_536  # that may be open, of a server process
WRITTEN = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)", re.MULTILINE)


def read_regular(path: str, most: int = MOST_BYTES) -> bytes:
    """The whole of a regular file of at most `most` bytes; OSError says what it is otherwise."""
    # without NONBLOCK opening a FIFO would wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(0, "not a regular file", path)
        if about.st_size > most:
            raise OSError(0, f"{about.st_size:,} bytes, more than {most:,}", path)
        data = bytearray()
        while piece := file.read(most + 1 - len(data)):
            data += piece
            if len(data) > most:  # it grows, or its size is not told (as in /proc)
                raise OSError(0, f"more than {most:,} bytes", path)
    return bytes(data)


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
