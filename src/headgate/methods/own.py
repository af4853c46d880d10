"""Policies and routers that are not ours: from a Python file (`my_policy.py:ClassName`) or a package."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TypeVar

from headgate.core.errors import InputError, one_line, unknown

GROUPS = {"policy": "headgate.policies", "router": "headgate.routers"}  # entry points of packages
Kind = TypeVar("Kind")


def own_class(text: str, what: str, base: type[Kind]) -> type[Kind]:
    """The class that FILE.py:CLASS names. The file is run, as Python runs a module that is imported."""
    file, _, name = text.removesuffix(".py").partition(".py:")
    path = Path(file + ".py")
    if not path.is_file():
        raise InputError(f"{what} {text!r}: no file {path}; write it as my_{what}.py:ClassName")
    about = path.stat()
    classes = _classes(path.absolute(), about.st_mtime_ns, about.st_size, str(path), what)
    found = {key: each for key, each in classes.items() if issubclass(each, base)}
    if not name:
        wanted = f"a subclass of headgate.{base.__name__} in it"
        listed = ", ".join(f"{path}:{each}" for each in found) or wanted
        raise InputError(f"{what} {text!r}: a file without a class; name one: {listed}")
    if name in classes and name not in found:
        raise InputError(f"{what} {text!r}: {name} is no subclass of headgate.{base.__name__}; make it one")
    if name not in found:
        raise unknown(f"{what} of {path}", name, found)
    return found[name]


def installed(name: str, what: str, base: type[Kind], ours: Iterable[str]) -> type[Kind]:
    """The class that an installed package offers under this name."""
    points = offers(what)
    offered = [point for point in points if point.name == name]
    if not offered:
        raise unknown(what, name, [*ours, *(point.name for point in points)])
    if len(offered) > 1:
        both = " and ".join(origin(point) for point in offered[:2])
        raise InputError(f"{what} {name} is offered by {both}; uninstall one of the two")
    return loaded(offered[0], what, base)


def loaded(point: EntryPoint, what: str, base: type[Kind]) -> type[Kind]:
    """The class behind an entry point; what is wrong with it is its package's fault and named so."""
    try:
        found = point.load()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{what} {point.name} of {origin(point)}: {one_line(error)}; reinstall its package"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InputError(
            f"{what} {point.name} of {origin(point)}: {point.value} is no subclass of "
            f"headgate.{base.__name__}; correct its package"
        )
    return found


def offers(what: str) -> list[EntryPoint]:
    """What installed packages offer."""
    return list(entry_points(group=GROUPS[what]))


def origin(point: EntryPoint) -> str:
    """The package an entry point is from, with its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


@lru_cache(maxsize=16)
def _classes(path: Path, changed: int, size: int, shown: str, what: str) -> dict[str, type]:
    """The classes of a file, run once as long as it does not change."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{what} file {shown}: cannot be run; give a Python file")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{what} file {shown}: {type(error).__name__}: {error}; fix the file") from error
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    }
