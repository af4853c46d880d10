"""A policy of the user's own, from a Python file: `my_policy.py:ClassName`."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from headgate.core.errors import InputError, unknown
from headgate.core.policy import BatchPolicy


def own_policy(text: str) -> type[BatchPolicy]:
    """The class that FILE.py:CLASS names. The file is run, as Python runs a module that is imported."""
    file, _, name = text.removesuffix(".py").partition(".py:")
    path = Path(file + ".py")
    if not path.is_file():
        raise InputError(f"policy {text!r}: no file {path}; write it as my_policy.py:ClassName")
    about = path.stat()
    found = _policies(path.absolute(), about.st_mtime_ns, about.st_size, str(path))
    if not name:
        classes = ", ".join(f"{path}:{each}" for each in found) or "a subclass of headgate.BatchPolicy in it"
        raise InputError(f"policy {text!r}: a file without a class; name one: {classes}")
    if name not in found:
        raise unknown(f"policy of {path}", name, found)
    return found[name]


@lru_cache(maxsize=16)
def _policies(path: Path, changed: int, size: int, shown: str) -> dict[str, type[BatchPolicy]]:
    """The policies of a file, run once as long as it does not change."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"policy file {shown}: cannot be run; give a Python file")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"policy file {shown}: {type(error).__name__}: {error}; mend the file") from error
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BatchPolicy) and value.__module__ == module.__name__
    }
