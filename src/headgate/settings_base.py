"""What all settings share: strict types, tables that refuse unknown names, and mistakes told in one line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo

from headgate.core.durations import duration
from headgate.core.errors import InputError, told_faults
from headgate.core.request import ENVELOPE, GAP, MEAN, MOST_WEIGHT, Slo, weight_remedy

# Strict, because a file that says slots = true or "5" is a mistake, not one slot or five.
Whole = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
FleetSize = Annotated[int, Field(strict=True, ge=1, le=10_000)]  # every engine is simulated
Positive = Annotated[float, Field(strict=True, gt=0)]
# per second: more than any fleet that is simulated serves
Rate = Annotated[float, Field(strict=True, gt=0, le=1e6)]
Tokens = Annotated[float, Field(strict=True, ge=1)]
Switch = Annotated[bool, Field(strict=True)]
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]


def seconds(value: object, info: ValidationInfo) -> object:
    """A duration such as 500ms in seconds. A number is seconds, except in a file, where it needs a unit."""
    bare = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
    return duration(str(value)) if isinstance(value, str) or (bare and info.context) else value


def _setting(value: object) -> object:
    if isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{value} is not a setting; give a number, a text, true or false")


def _some(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("the list is empty; fill it or drop the setting")
    return values


def declared(
    panel: str,
    about: str,
    default: Any = None,
    *,
    flag: str | None = "",
    also: tuple[str, ...] = (),
    **limits: Any,
) -> Any:
    """A setting: its place in `--help`, what it means, its default. `cli/flags.py` makes a flag of it.

    `flag` is another name for the flag; None leaves it to the commands, which take it in their own form.
    `also` are further names of the setting, in files and as flags.
    """
    more: dict[str, Any] = {"panel": panel, "flag": flag, "also": list(also)}
    return Field(default, description=about, json_schema_extra=more, **limits)


def parameters(panel: str, about: str, example: str) -> Any:
    """A table of parameters, empty unless given; on the command line NAME=VALUE, once for each."""
    more: dict[str, Any] = {"panel": panel, "flag": "", "example": example}
    return Field(default_factory=dict, description=about, json_schema_extra=more)


# Settings that promise something between tokens, at most one of them: what each is about, and its meaning.
BETWEEN = {"tbt": GAP, "tpot": MEAN, "envelope": ENVELOPE}
MEANINGS = {
    "tbt": "promises every gap",
    "tpot": "the mean of a request",
    "envelope": "the moment each token is due",
}
ALSO_GAPS = ("itl", "gap")  # other names of `tbt`
BETWEEN_SHOWN = {GAP: "gaps", MEAN: "TPOT", ENVELOPE: "envelope"}  # what reports call them


def flag_of(word: str) -> str:
    return "--" + word.replace("_", "-")


def promised(words: Any, **worth: Any) -> Slo:
    """What a table with `ttft` and one of `tbt`, `tpot` and `envelope` promises; see `check_promises`."""
    for word, kind in BETWEEN.items():
        if (limit := getattr(words, word)) is not None:
            return Slo(words.ttft, limit, kind, **worth)
    return Slo(words.ttft, **worth)


def check_promises(words: Any, prefix: str = "") -> None:
    """One promise between tokens: of every gap, of their mean, or of when each token is due."""
    given = [f"{prefix}{word} {MEANINGS[word]}" for word in BETWEEN if getattr(words, word) is not None]
    if len(given) > 1:
        which = "one of the two" if len(given) == 2 else "all but one"
        raise ValueError(f"{', '.join(given)}; drop {which}")


def check_worth(words: Any) -> None:
    weight, background = words.weight, words.background
    promises = {name: getattr(words, name) for name in ("ttft", *BETWEEN)}
    if weight is not None and not 0 < weight <= MOST_WEIGHT:
        raise ValueError(f"weight={weight:g}; {weight_remedy(weight)}")
    promised = [f"{name}={seconds:g}s" for name, seconds in promises.items() if seconds is not None]
    if background and promised:
        raise ValueError(f"background and {promised[0]}; background promises nothing: drop one")


NotEmpty = AfterValidator(_some)
Seconds = Annotated[float, BeforeValidator(seconds), Field(strict=True, gt=0)]
Delay = Annotated[float, BeforeValidator(seconds), Field(strict=True, ge=0)]
NotNegative = Annotated[float, Field(strict=True, ge=0)]
Weight = Annotated[float, Field(strict=True)]  # `check_worth` looks at it
Setting = Annotated[Any, BeforeValidator(_setting)]


REMEDIES = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "a number below {lt}",
    "finite_number": "a finite number",
    "int_type": "a whole number, without quotes",
    "int_parsing": "a whole number, without quotes",
    "int_from_float": "a whole number",
    "float_type": "a number, without quotes",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "literal_error": "{expected}",
}  # by pydantic's names of faults


class SettingsModel(BaseModel):
    """A table of settings; unknown names are mistakes. Each field is declared once, with `declared`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, values: Any) -> Any:
        return cls.renamed(values) if isinstance(values, dict) else values

    @classmethod
    def renamed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The same under the settings' own names; two names for one setting are a mistake."""
        own = {other: name for name, field in cls.model_fields.items() for other in also(field)}
        settings: dict[str, Any] = {}
        for name, value in values.items():
            setting = own.get(name, name)
            if setting in settings:
                raise InputError(f"{name!r} and {setting!r} are one setting; drop one of the two")
            settings[setting] = value
        return settings


def also(field: FieldInfo) -> list[str]:
    more = field.json_schema_extra
    names = more.get("also", []) if isinstance(more, dict) else []
    return [str(name) for name in names] if isinstance(names, list) else []


Checked = TypeVar("Checked", bound=SettingsModel)


def read_toml(path: str | Path, what: str = "experiment file") -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{what} {path}: {error.strerror or error}; give a readable file") from None
    except UnicodeDecodeError:
        raise InputError(f"{what} {path}: not UTF-8 text; give a TOML file") from None
    return parse_toml(text, path, what)


def parse_toml(text: str, path: str | Path, what: str) -> dict[str, Any]:
    try:
        return underscored(tomllib.loads(text), f"{what} {path}: ")
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{what} {path}: not valid TOML: {error}; fix the file") from None
    except (RecursionError, ValueError) as error:  # nested without end, a number of thousands of digits
        if isinstance(error, InputError):
            raise
        raise InputError(f"{what} {path}: cannot be read: {str(error)[:60]}; fix the file") from None


def underscored(table: dict[str, Any], where: str) -> dict[str, Any]:
    """The same with underscores for dashes, in the tables of classes and stages too."""
    settings: dict[str, Any] = {}
    for name, value in table.items():
        setting = name.replace("-", "_")
        if setting in settings:
            raise InputError(f"{where}{name!r} is given twice, with a dash and an underscore; drop one")
        if isinstance(value, list):
            value = [underscored(item, where) if isinstance(item, dict) else item for item in value]
        settings[setting] = value
    return settings


def checked(kind: type[Checked], settings: dict[str, Any], where: str = "", written: bool = False) -> Checked:
    """Settings of any kind, checked. `written`: they are from a file, where a duration needs a unit."""
    try:
        return kind.model_validate(settings, context=written or None)
    except InputError as error:  # from a duration
        raise InputError(f"{where}{error}") from None
    except ValidationError as error:
        faults = [{**fault, "msg": plainly(fault)} for fault in error.errors(include_url=False)]
        raise InputError(where + told_faults(faults, partial(_fields_at, kind))) from None


def _fields_at(kind: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    for part in place:
        if (field := kind.model_fields.get(str(part))) is not None:
            nested = (field.annotation, *get_args(field.annotation))
            tables = (each for each in nested if isinstance(each, type) and issubclass(each, BaseModel))
            kind = next(tables, kind)
    return list(kind.model_fields)


def plainly(fault: Mapping[str, Any]) -> str:
    """A validator's fault with what to give instead, where REMEDIES has it."""
    wanted = REMEDIES.get(fault["type"])
    if wanted is None:
        return str(fault["msg"])
    shown = str(fault["input"])[:40]
    return f"{shown} is not allowed; give {wanted.format_map(fault.get('ctx', {}))}"
