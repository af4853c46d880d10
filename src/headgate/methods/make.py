"""A name, or FILE.py:CLASS, becomes a policy or a router.

Names are ours (`names.py`) or those of installed packages, by the entry points `headgate.policies` and
`headgate.routers`. Ours win where both have one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headgate.core.durations import duration
from headgate.core.errors import InputError, elsewhere, one_line, unknown
from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy
from headgate.cost.model import StepCost
from headgate.methods.names import BATCH, PAPERS, ROUTE

EXAMPLES = {"policy": "eb:refill=48", "router": "split:prefill=2"}
GIVEN = ("plan", "engines", "draw", "sharing")  # what the run itself gives to a router; the rest are settings
KINDS: dict[str, tuple[Callable[[str], Any], str]] = {  # how a parameter is read, by its annotation
    "int": (int, "a whole number"),
    "float": (float, "a finite number"),
    "bool": ({"true": True, "false": False}.__getitem__, "true or false"),
    "_empty": (lambda text: _read(text), "text"),  # compiled classes keep no annotations
}
TIMES = (  # parameters in seconds, which may have a unit: ttft=500ms. By name: compiled classes say no types
    "ttft", "tbt", "first_token", "between_tokens", "max_gap", "dwell", "max_pause", "max_wait", "ttl",
    "every", "half_life",
)  # fmt: skip
Kind = TypeVar("Kind")


class EngineLimits(Protocol):
    """What a policy knows of its engine: slots, tokens of one step and of a decode in it, what steps take."""

    @property
    def running(self) -> int: ...
    @property
    def batch_tokens(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def cost(self) -> StepCost: ...


def split_name(text: str, what: str = "policy") -> tuple[str, dict[str, str]]:
    file, own, tail = text.partition(".py:")
    name, _, rest = (tail if own else text).partition(":")
    name = f"{file}.py:{name}" if own else name
    settings: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{what} {text!r}: {part!r} is not NAME=VALUE; write it as {EXAMPLES[what]}")
        if key.strip() in settings:
            raise InputError(f"{what} {text!r}: {key.strip()} is set twice; drop one of the two")
        settings[key.strip()] = value.strip()
    return name.strip(), settings


def make_policy(
    name: str, settings: Mapping[str, Any], engine: EngineLimits
) -> tuple[BatchPolicy, dict[str, Any]]:
    values: dict[str, Any] = {}
    limits = {"slots": engine.running, "budget": engine.batch_tokens}
    wanted = policy_parameters(name)
    for given in settings:
        if given not in wanted:
            raise unknown(f"parameter of policy {name}", given, wanted)
    for parameter in wanted.values():
        if parameter.name in limits:  # whole numbers, also in a class without annotations
            parameter = parameter.replace(annotation=int)
        if parameter.name in settings:
            values[parameter.name] = typed(f"policy {name}", parameter, settings[parameter.name])
        elif parameter.name in limits:
            values[parameter.name] = limits[parameter.name]
        elif parameter.default is parameter.empty:
            raise InputError(f"policy {name} needs {parameter.name}; pass --set {parameter.name}=VALUE")
    _check_limits(name, values, engine)
    policy = policy_class(name)
    own = {"cost": engine.cost} if "cost" in inspect.signature(policy).parameters else {}
    return _built("policy", name, policy, {**values, **own}), values


def _check_limits(name: str, values: Mapping[str, Any], engine: EngineLimits) -> None:
    for limit, most in (("slots", engine.running), ("budget", engine.batch_tokens)):
        if values.get(limit, 0) > most:
            raise InputError(
                f"policy {name}: {limit}={values[limit]} exceeds the engine's {most}; raise --{limit}"
            )
    slots, budget = values.get("slots", engine.running), values.get("budget", engine.batch_tokens)
    if engine.width > 1 and name == "sglang":
        raise InputError("policy sglang: drafts are simulated as vLLM runs them; drop --speculate")
    if engine.width > 1 and budget < slots * engine.width:
        raise InputError(
            f"policy {name}: budget={budget} is below {slots} slots of {engine.width} tokens each, drafts "
            "included; raise budget or lower slots or --speculate"
        )


def policy_parameters(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(policy_class(name)).parameters
    return {key: each for key, each in parameters.items() if key != "cost"}


def policy_class(name: str) -> type[BatchPolicy]:
    return _class_of("policy", name, BATCH, BatchPolicy)


def make_router(
    name: str, given: Mapping[str, Callable[[], Any]], settings: Mapping[str, Any]
) -> RoutePolicy:
    values, wanted = router_settings(name, settings), inspect.signature(router_class(name)).parameters
    for each in router_parameters(name).values():
        if each.default is each.empty and each.name not in values:
            raise InputError(f"router {name} needs {each.name}; write {name}:{each.name}=VALUE")
    have = {key: make() for key, make in given.items() if key in wanted}
    return _built("router", name, router_class(name), {**have, **values})


def router_settings(name: str, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    own = router_parameters(name)
    for key in settings or {}:
        if key not in own:
            raise (
                unknown(f"parameter of router {name}", key, own)
                if own
                else InputError(f"router {name} has no parameters; drop {key}")
            )
    return {key: typed(f"router {name}", own[key], value) for key, value in (settings or {}).items()}


def router_parameters(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(router_class(name)).parameters
    return {key: each for key, each in parameters.items() if key not in GIVEN}


def router_class(name: str) -> type[RoutePolicy]:
    return _class_of("router", name, ROUTE, RoutePolicy)


def typed(about: str, parameter: inspect.Parameter, value: object) -> object:
    written = parameter.annotation
    kind = (written if isinstance(written, str) else getattr(written, "__name__", "")).removesuffix(" | None")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    read, what = KINDS.get(kind, (str, "text"))
    if parameter.name in TIMES and text[-1:].isalpha() and kind in ("float", "_empty"):
        read, what = partial(duration, units=None), "a duration such as 500ms, or a number of seconds"
    try:
        found = read(text)
    except (ValueError, KeyError):
        found = None
    if found is None or (isinstance(found, float) and not isfinite(found)):
        raise InputError(f"{about}: {parameter.name}={text!r} is not {what}; fix it")
    return found


def _read(text: str) -> object:
    for kind in ("int", "float", "bool"):
        try:
            return KINDS[kind][0](text)
        except (ValueError, KeyError):
            continue
    return text


def _class_of(what: str, name: str, ours: Mapping[str, type[Kind]], base: type[Kind]) -> type[Kind]:
    if ".py:" in name or name.endswith(".py"):
        return own_class(name, what, base)
    if name in ours:
        return ours[name]
    return installed_class(name, what, base, ours)


def _built(what: str, name: str, made: Callable[..., Kind], given: dict[str, Any]) -> Kind:
    """The constructor may be the user's own: an error in it is theirs to fix."""
    try:
        return made(**given)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{what} {name} cannot be made: {one_line(error)}; fix it") from error


# -- from a Python file or an installed package

GROUPS = {"policy": "headgate.policies", "router": "headgate.routers"}  # entry points of packages


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


def installed_class(name: str, what: str, base: type[Kind], ours: Iterable[str]) -> type[Kind]:
    points = offers(what)
    offered = [point for point in points if point.name == name]
    if not offered and (what, name) == ("policy", "auto"):
        what_it_is = "keep with a promise and eb+ without, with step times learned while it serves"
        raise InputError(f"policy auto is {what_it_is}; simulate those")
    if not offered and (what, name) == ("policy", "vllm"):
        raise InputError("policy vllm is vLLM's own scheduling; simulate mixed, which schedules alike")
    if not offered and name in PAPERS:
        raise elsewhere(f"{what} {name}", "papers")
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
    return list(entry_points(group=GROUPS[what]))


def origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value
