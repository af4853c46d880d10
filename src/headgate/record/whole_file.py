"""A file that appears whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(target: str | Path, text: str) -> None:
    """Replace a file, or leave what was there as it was: a full disk must not cost what somebody kept."""
    path = Path(target)
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    with tempfile.TemporaryDirectory(prefix=f".{path.name[:100]}-", dir=path.parent) as scratch:
        whole = Path(scratch, "whole")
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, path)
