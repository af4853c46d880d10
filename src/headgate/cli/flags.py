"""Flags derived from declared settings: name, type, meaning, place in `--help` and default are the field's.

`takes_settings` makes flags of every parameter of a command whose annotation is a class of settings; the
command gets it checked. `Annotated[dict[str, Any], CLASS]` asks for what was given, unchecked. An
`Experiment` is also read from a file, which flags override.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from headgate.core.errors import InputError
from headgate.experiment.settings import ENGINE, FLEET, LENGTHS, LOAD, POLICY, TRACE, Experiment, experiment
from headgate.settings_base import SettingsModel, also, checked, flag_of, read_toml, seconds

PANELS = (POLICY, ENGINE, LENGTHS, LOAD, TRACE, FLEET)  # their order in --help; others as declared
FILE = "an experiment file (TOML); flags override what it says"
NO_GAPS = "--tbt promises every gap, which plans do not know: give the mean, --tpot, or ask headgate advise"
NO_ENVELOPE = (
    "--envelope: plans do not know it; give the mean, --tpot, or --slo envelope=... of headgate advise"
)
MIX = "classes of requests from a TOML file of class tables"
KEYWORD = inspect.Parameter.KEYWORD_ONLY
Command = Callable[..., None]
Table = type[SettingsModel]


def option(table: Table, name: str, flag: str = "") -> Any:
    field = table.model_fields[name]
    return typer.Option(flag or flag_of(name), help=_help(field), rich_help_panel=_extra(field, "panel"))


def takes_settings(command: Command, fleet: bool = False, hidden: Collection[str] = ()) -> Command:
    """Give a command the flags of its settings, of an Experiment without those about fleets; what it refuses
    is `hidden`.
    """
    hints = get_type_hints(command, include_extras=True)
    tables: dict[str, tuple[Table, bool]] = {}
    own: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        hint = hints[each.name]
        kinds = (kind for kind in (hint, *getattr(hint, "__metadata__", ())) if isinstance(kind, type))
        table = next((kind for kind in kinds if issubclass(kind, SettingsModel)), None)
        if table is None:
            own.append(each.replace(kind=KEYWORD, annotation=hint))
        else:
            tables[each.name] = table, hint is table

    @functools.wraps(command)
    def with_settings(**values: Any) -> None:
        made: dict[str, Any] = {}
        for name, (table, check) in tables.items():
            given = _given(table, values, fleet)
            if table is Experiment:
                made[name] = gather(values.pop("file"), values.pop("mix"), given)
                if not (fleet or "search" in tables) and (made[name].tbt or made[name].envelope):
                    raise InputError(NO_GAPS if made[name].tbt else NO_ENVELOPE)
            else:
                made[name] = checked(table, given) if check else given
        command(**made, **values)

    tuned, flags = _parameters([table for table, _ in tables.values()], fleet, hidden)
    parameters = [*tuned, *own, *flags]
    with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_settings


takes_fleet_settings = functools.partial(takes_settings, fleet=True)


def _fields(table: Table, fleet: bool) -> Iterator[tuple[str, FieldInfo]]:
    found = {name: field for name, field in table.model_fields.items() if _extra(field, "flag") is not None}
    if table is Experiment:
        found = {name: field for name, field in found.items() if fleet or _extra(field, "panel") != FLEET}
        yield from sorted(found.items(), key=lambda each: PANELS.index(_extra(each[1], "panel")))
    else:
        yield from found.items()


def _extra(field: FieldInfo, name: str) -> Any:
    more = field.json_schema_extra
    return more.get(name) if isinstance(more, dict) else None


def _parameter(name: str, field: FieldInfo, alias: str = "", hidden: bool = False) -> inspect.Parameter:
    """One flag. Its default is always None: what was not given is left to a file and to the field."""
    kind, flag = flag_type(field), alias or _extra(field, "flag") or flag_of(name)
    if field.default is True and "/" not in flag:  # or nothing could switch it off
        flag = f"{flag}/--no-{flag[2:]}"
    panel, hidden = _extra(field, "panel"), hidden or bool(alias)
    shown = typer.Option(flag, help=_help(field), rich_help_panel=panel, hidden=hidden)
    return inspect.Parameter(name, KEYWORD, default=None, annotation=Annotated[kind | None, shown])


def _help(field: FieldInfo) -> str:
    text, default = field.description or "", field.default
    if other := also(field):
        text += f" (also {', '.join(map(flag_of, other))})"
    if field.default_factory or "(default: " in text or isinstance(default, bool) or not str(default or ""):
        return text if default != 0 or isinstance(default, bool) else f"{text} (default: 0)"
    return f"{text} (default: {default})"


def flag_type(field: FieldInfo) -> Any:
    """What the command line reads for a setting: durations are text, tables and lists come piece by piece."""
    base: Any = field.annotation
    if get_origin(base) in (Union, UnionType):
        base = next(each for each in get_args(base) if each is not type(None))
    metadata = list(field.metadata)
    while get_origin(base) is Annotated:
        base, *more = get_args(base)
        metadata += more
    if any(isinstance(each, BeforeValidator) and each.func is seconds for each in metadata):
        return str
    if get_origin(base) is Literal:  # checked by the settings; typer knows it from 0.19 on
        return type(get_args(base)[0])
    return list[str] if (get_origin(base) or base) in (dict, tuple) else base


def _parameters(
    tables: list[Table], fleet: bool, hidden: Collection[str]
) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Flags in the order of --help: before a command's own (files, tables of parameters) and after them."""
    first: list[inspect.Parameter] = []
    rest: list[inspect.Parameter] = []
    for table in sorted(tables, key=lambda table: table is Experiment):  # those of the run come last
        for name, field in _fields(table, fleet):
            early = table is Experiment and _extra(field, "example")
            (first if early else rest).append(_parameter(name, field, hidden=name in hidden))
            rest += [_parameter(other, field, flag_of(other)) for other in also(field)]
    if Experiment in tables:
        file = Annotated[str | None, typer.Argument(help=FILE)]
        mix = Annotated[str | None, typer.Option("--mix", help=MIX, rich_help_panel=LENGTHS)]
        first.insert(0, inspect.Parameter("file", KEYWORD, default=None, annotation=file))
        first.append(inspect.Parameter("mix", KEYWORD, default=None, annotation=mix))
    return first, rest


def _given(table: Table, values: dict[str, Any], fleet: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    known = {one: field for own, field in _fields(table, fleet) for one in (own, *also(field))}
    for name, field in known.items():
        value = values.pop(name)
        if value and get_origin(field.annotation) is dict:
            value = named_values(value, flag_of(name), _extra(field, "example"))
        if value is not None and value != []:
            found[name] = value
    return found


def gather(file: str | None, mix: str | None, flags: dict[str, Any]) -> Experiment:
    """The settings of a file, overridden by flags; tables of parameters are overridden one by one."""
    settings, flags = {} if file is None else Experiment.renamed(read_toml(file)), Experiment.renamed(flags)
    where = "" if file is None else f"experiment file {file}: "
    experiment(settings, where, written=True)  # so that a mistake in the file is not blamed on the flags
    if mix is not None:
        classes = read_toml(mix, "mix file")
        if set(classes) != {"classes"}:
            raise InputError(f"mix file {mix}: must hold [[classes]] tables and nothing else; correct it")
        experiment(classes, f"mix file {mix}: ", written=True)
        settings |= classes
    for name, value in flags.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return experiment(settings, written=True)


def named_values(texts: list[str], flag: str = "--set", example: str = "refill=48") -> dict[str, str]:
    found = dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"{flag} {text!r} is not NAME=VALUE; write it as {flag} {example}")
        if name.strip() in found:
            raise InputError(f"{flag} {name.strip()} is given twice; drop one of the two")
        found[name.strip()] = value.strip()
    return found
