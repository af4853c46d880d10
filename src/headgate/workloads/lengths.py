"""Length laws: how many tokens prompts and outputs have."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headgate.core.errors import InputError, unknown
from headgate.workloads.formats import BadFieldError, as_text, is_number, read_bytes, tokens
from headgate.workloads.workload import LENGTHS, LONGEST, Whole, column

WIDEST = 20  # of sigma: beyond, almost every length is 1 and the mean lies in draws that never come


class LengthLaw(Protocol):
    def draw(self, count: int, generator: np.random.Generator) -> Whole:
        """So many lengths, each a whole number of at least 1."""


@dataclass(frozen=True)
class _WithMean:
    mean: float

    def __post_init__(self) -> None:
        _check("mean", self.mean, 1 <= self.mean <= LONGEST, f"a number of tokens from 1 to {LONGEST}")


@dataclass(frozen=True)
class Fixed(_WithMean):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mean != math.floor(self.mean):
            raise InputError(f"a fixed length of {self.mean:g} tokens is not whole; round it")

    def draw(self, count: int, generator: np.random.Generator) -> Whole:
        return np.full(count, int(self.mean), dtype=np.int64)


@dataclass(frozen=True)
class Uniform(_WithMean):
    """Whole numbers, equally likely, from (1 - spread) to (1 + spread) times the mean.

    The mean is exact when it is a whole number: below 1 the range is cut on both sides alike. Otherwise it is
    off by less than half a token.
    """

    spread: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("spread", self.spread, 0 <= self.spread <= 1, "a number from 0 to 1")
        low, high = self.range()
        if low > high:
            raise InputError(
                f"no whole number lies within {self.spread:g} of {self.mean:g}; use a wider spread"
            )

    def range(self) -> tuple[int, int]:
        reach = min(self.mean * self.spread, self.mean - 1)
        return math.ceil(self.mean - reach), math.floor(self.mean + reach)

    def draw(self, count: int, generator: np.random.Generator) -> Whole:
        low, high = self.range()
        return generator.integers(low, high, count, endpoint=True)


@dataclass(frozen=True)
class Geometric(_WithMean):
    """Every token is the last with the same probability: constant hazard, support 1, 2, ..., exact mean."""

    def draw(self, count: int, generator: np.random.Generator) -> Whole:
        return np.minimum(generator.geometric(1 / self.mean, count), LONGEST)


@dataclass(frozen=True)
class Gamma(_WithMean):
    """A gamma law rounded to whole numbers: rising hazard for a shape above 1, falling below.

    Rounding up to 1 what falls below lifts the mean: with shape 1 by 35 % at a mean of 1, by 0.45 % at 10, by
    0.005 % at 100; less with larger shapes.
    """

    shape: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("shape", self.shape, 0 < self.shape < math.inf, "a number above 0")

    def draw(self, count: int, generator: np.random.Generator) -> Whole:
        return _rounded(generator.gamma(self.shape, self.mean / self.shape, count))


@dataclass(frozen=True)
class LogNormal(_WithMean):
    """A log-normal law rounded to whole numbers; `mean` is that of the law, `sigma` belongs to its logarithm.

    Rounding up to 1 what falls below lifts the mean: with sigma 1 by 37 % at a mean of 1, by 0.07 % at 10;
    more with larger sigmas.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("sigma", self.sigma, 0 <= self.sigma <= WIDEST, f"a number from 0 to {WIDEST}")

    def draw(self, count: int, generator: np.random.Generator) -> Whole:
        return _rounded(generator.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count))


@dataclass(frozen=True, eq=False)
class Empirical:
    values: npt.ArrayLike

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", column(LENGTHS, self.values, "length"))
        if np.size(self.values) == 0:
            raise InputError("an empirical law of no lengths; give at least one")

    def draw(self, count: int, generator: np.random.Generator) -> Whole:
        seen = np.asarray(self.values, dtype=np.int64)
        return seen[generator.integers(0, len(seen), count)]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Prompt and output lengths seen together, drawn as pairs with replacement: keeps their dependence."""

    prompt: npt.ArrayLike
    output: npt.ArrayLike

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            object.__setattr__(self, name, column(LENGTHS, getattr(self, name), name))
        prompts, outputs = np.size(self.prompt), np.size(self.output)
        if prompts != outputs or prompts == 0:
            raise InputError(f"{prompts} prompts and {outputs} outputs make no pairs; give as many of each")

    def draw(self, count: int, generator: np.random.Generator) -> tuple[Whole, Whole]:
        rows = self.rows(count, generator)
        return np.asarray(self.prompt)[rows], np.asarray(self.output)[rows]

    def rows(self, count: int, generator: np.random.Generator) -> Whole:
        return generator.integers(0, np.size(self.prompt), count)


LAWS: dict[str, Callable[..., LengthLaw]] = {"fixed": Fixed, "uniform": Uniform, "geometric": Geometric}
LAWS |= {"gamma": Gamma, "lognormal": LogNormal}
FROM_FILE = "lengths="


def length_law(name: str, mean: float | None = None, **parameters: float | str) -> LengthLaw:
    """The length law of this name with its parameters, or `lengths=FILE` (parameter: column).

    Examples:
        >>> import headgate
        >>> headgate.length_law("gamma", 512, shape=4)
        Gamma(mean=512, shape=4.0)
    """
    if name.startswith(FROM_FILE):
        if mean is not None:
            raise InputError(f"{name!r} has its own mean; drop the mean or choose another law")
        _check_parameters(FROM_FILE + "FILE", parameters, ("column",))
        column = parameters.get("column")
        return Empirical(_lengths_in(name.removeprefix(FROM_FILE), None if column is None else str(column)))
    if name not in LAWS:
        raise unknown("length law", name, (*LAWS, FROM_FILE + "FILE"))
    law = LAWS[name]
    known = [each.name for each in fields(law) if each.name != "mean"]  # type: ignore[arg-type]
    _check_parameters(name, parameters, known)
    if mean is None:
        raise InputError(f"lengths {name!r} need a mean; give it in tokens")
    numbers: dict[str, float] = {}
    for key, value in parameters.items():
        try:
            numbers[key] = float(value)
        except ValueError:
            raise InputError(f"{key} of a length law is {value!r}; give a number") from None
    return law(mean, **numbers)


def _check_parameters(name: str, parameters: dict[str, float | str], known: Sequence[str]) -> None:
    for parameter in parameters:
        if not known:
            raise InputError(f"lengths {name!r} have no {parameter!r}; only a mean")
        if parameter not in known:
            raise unknown(f"parameter of lengths {name!r}", parameter, known)


def _check(what: str, value: float, good: bool, remedy: str) -> None:
    if not good:
        raise InputError(f"{what} of a length law is {value:g}; give {remedy}")


def _rounded(drawn: npt.NDArray[np.float64]) -> Whole:
    return np.clip(np.rint(drawn), 1, LONGEST).astype(np.int64)


def _lengths_in(path: str | os.PathLike[str], column: str | None) -> list[int]:
    rows = csv.reader(as_text(path, read_bytes(path)).splitlines())
    place, lengths, first = 0, [], True
    try:
        for row in filter(None, rows):
            if first and (column is not None or not is_number(row[0])):
                names = [name.strip() for name in row]
                if column not in names and (column is not None or len(names) > 1):
                    wanted = f"no column {column!r}" if column else "several columns"
                    raise InputError(f"{path}: {wanted}; name one of: {', '.join(names)}")
                place = 0 if column is None else names.index(column)
            else:
                lengths.append(tokens(row[place], "the length"))
            first = False
    except (BadFieldError, IndexError, csv.Error) as error:
        reason = "the length is missing" if isinstance(error, IndexError) else error
        raise InputError(f"{path}:{rows.line_num}: {reason}; fix the line") from None
    if not lengths:
        raise InputError(f"{path}: no lengths in it; give one per line")
    return lengths
