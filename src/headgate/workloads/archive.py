"""A workload's columns in one npz file, with a header that says what it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.core.errors import InputError

FORMAT = "headgate workload 1"


def write(
    path: str | os.PathLike[str], columns: Mapping[str, npt.NDArray[Any]], header: Mapping[str, object]
) -> None:
    """Writes columns and header exactly to `path`; numpy itself would append .npz to other names."""
    text = json.dumps({"format": FORMAT, **header}, default=str)
    try:
        with open(path, "wb") as file:
            np.savez_compressed(file, header=np.array(text), **columns)  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"{path}: cannot be written, {error.strerror}; choose another path") from None


def read(path: str | os.PathLike[str]) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Columns and header of a file that `write` made; anything else is an InputError."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            header = json.loads(str(stored["header"]))
            columns = {name: stored[name] for name in stored.files if name != "header"}
    except OSError as error:
        reason = error.strerror or "damaged"
        raise InputError(f"{path}: cannot be read, {reason}; check the path") from None
    except Exception:  # zipfile and numpy have a dozen ways to fail on a damaged file, and no common error
        raise foreign(path) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise foreign(path)
    return columns, header


def foreign(path: str | os.PathLike[str]) -> InputError:
    """The error for a file that is damaged or was not written here."""
    return InputError(f"{path}: not a saved workload, or a damaged one; save it again or read it as a trace")
