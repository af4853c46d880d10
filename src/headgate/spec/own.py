"""A policy of the user's own, from a Python file: `my_policy.py:ClassName`."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from headgate.core.errors import InputError, unknown
from headgate.core.policy import BatchPolicy


def own_policy(text: str) -> type[BatchPolicy]:
    """The class that FILE.py:CLASS names. The file is run, as Python runs a module that is imported."""
    file, _, name = text.partition(".py:")
    path = Path(file + ".py")
    spec = spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(f"policy {text!r}: no file {path}; write it as my_policy.py:ClassName")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"policy file {path}: {type(error).__name__}: {error}; mend the file") from error
    found = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BatchPolicy) and value.__module__ == module.__name__
    }
    if name not in found:
        raise unknown(f"policy of {path}", name, found)
    return found[name]
