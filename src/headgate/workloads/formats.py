"""Trace files: the published formats, the rows of a file in each, and what one field of a row must be."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from headgate.core.errors import InputError, unknown
from headgate.core.files import parse_line
from headgate.workloads.workload import LONGEST

# -- one field of a row


class BadFieldError(ValueError):
    """Why one field of one row cannot be used."""


def seconds(value: object, what: str) -> float:
    number = _number(value, what)
    if number < 0:
        raise BadFieldError(f"{what} is {value}, before the start")
    return number


def is_number(text: str) -> bool:
    """Whether a cell is meant as one; a wrong number is no header and no date."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def as_written(value: object, what: str) -> float:
    """A number as it stands; a date, such as 2023-11-16T18:15:46Z, in nanoseconds since 1970."""
    try:
        return seconds(value, what)
    except BadFieldError:
        if not isinstance(value, str) or not value.strip() or is_number(value):
            raise
        if not value.strip()[:4].isdigit():
            raise BadFieldError(
                f"{what} is {value[:40]!r}, not a number and not a time such as 2023-11-16T18:15:46Z"
            ) from None
    return nanoseconds(value.strip().replace("Z", "+00:00"), what)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def nanoseconds(value: object, what: str) -> int:
    """A calendar time, such as 2023-11-16 18:15:46.6805900, since 1970; without a zone it counts as UTC.

    Whole nanoseconds keep every published digit; `datetime` alone stops at microseconds.
    """
    moment, _, rest = str(value).strip().partition(".")
    zone = rest.lstrip("0123456789")
    fraction = rest[: len(rest) - len(zone)][:9].ljust(9, "0")
    try:
        return _whole_seconds(moment + zone) * NANO + int(fraction)
    except ValueError:
        shown = str(value)[:40]
        raise BadFieldError(f"{what} is {shown!r}, not a time such as 2023-11-16 18:15:46.68") from None


_CLOCK = re.compile(r"\d+-\d+-\d+[T ]\d\d:\d\d(?::\d\d)?(?:\.\d*)?\s*(Z|[+-]\d\d:?\d\d)?")


def has_zone(fields: Fields | str) -> bool | None:
    """Whether a time of the clock says its zone; None where the arrival is no such time."""
    text = fields.arrival if isinstance(fields, Fields) else None
    found = _CLOCK.fullmatch(text.strip()) if isinstance(text, str) else None
    return found and found[1] is not None


@lru_cache(maxsize=64)
def _whole_seconds(moment: str) -> int:
    """Seconds since 1970; kept for a while, as neighbouring rows of a trace share their second."""
    when = datetime.fromisoformat(moment)
    since = (when if when.tzinfo else when.replace(tzinfo=UTC)) - _EPOCH
    return since.days * 86_400 + since.seconds


def tokens(value: object, what: str) -> int:
    """A length of at least one token; whole numbers written as 512.0 are taken too."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:  # as almost every field is
        count = int(value)
    else:
        number = _number(value, what)
        if number != math.floor(number):
            raise BadFieldError(f"{what} is {value}, not a whole number")
        count = int(number)
    if not 1 <= count <= LONGEST:
        raise BadFieldError(f"{what} is {count}, not a length from 1 to {LONGEST}")
    return count


def _number(value: object, what: str) -> float:
    """A finite number from text or JSON; true and false are not numbers here."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise BadFieldError(
            f"{what} is {value!r}, not a number" if value is not None else f"{what} is missing"
        )
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise BadFieldError(f"{what} is {str(value)[:40]!r}, not a number") from None
    if not math.isfinite(number):
        raise BadFieldError(f"{what} is {str(value)[:40]}, not a finite number")
    return number


# -- the formats

TOOLS = VLLM, AIPERF, GUIDELLM = "vllm-bench", "aiperf", "guidellm"  # whose files are no rows of columns
COLUMNS, TENANT = "--columns", "tenant"


class Format(NamedTuple):
    json: bool  # one JSON object per line; otherwise CSV with a header, read by name
    arrival: str  # columns
    prompt: str
    output: str
    clock: Callable[[object, str], float] = seconds  # how one arrival time is read
    ticks: float = 1  # units of that clock in a second
    calendar: bool = False  # the clock is a calendar: the first request sets the start
    lengths_only: bool = False  # files without arrivals exist
    client: str = ""  # column
    tenant: str = ""  # column; where none is named, one called tenant may be there
    mark: str = ""  # a column that distinguishes the format from others with the same ones
    classes: bool = False  # clients are classes of requests, which keep their names
    hashed: int = 0  # tokens that one entry of `hash_ids` stands for; 0: the format has none
    any_unit: bool = False  # times may be in any unit, which is told by their size (`unit_of`)
    shared: tuple[tuple[str, str], ...] = ()  # what SHARING's columns are called, where they have other names

    def sharing(self) -> dict[str, str]:
        return {name: name for name in SHARING} | dict(self.shared)

    def required(self) -> list[str]:
        arrival = "" if self.lengths_only else self.arrival
        shared = [column for _, column in self.shared]
        names = (arrival, self.prompt, self.output, self.client, self.tenant, self.mark, *shared)
        return [name for name in names if name]


def _format(columns: str, json: bool = True, **more: Any) -> Format:
    arrival, prompt, output = columns.split("/")
    return Format(json, arrival, prompt, output, **more)


NANO = 1_000_000_000
AS_SENT = {"calendar": True}  # requests by the clock of the machine that sent them
VIDUR = "arrived_at/num_prefill_tokens/num_decode_tokens"
FORMATS: dict[str, Format] = {
    AIPERF: _format("request_start_ns/input_sequence_length/output_sequence_length", ticks=NANO, **AS_SENT),
    GUIDELLM: _format("start_time/prompt_tokens/output_tokens", **AS_SENT),
    VLLM: _format("start_times/input_lens/output_lens", **AS_SENT),
    "servegen-offline": _format("arrival/input_length/output_length", lengths_only=True, mark="request_id"),
    "azure": _format(
        "TIMESTAMP/ContextTokens/GeneratedTokens", json=False, clock=nanoseconds, ticks=NANO, calendar=True
    ),
    "burstgpt": _format("Timestamp/Request tokens/Response tokens", json=False),
    "headgate-route": _format(
        "arrival/prompt/replay_output", client="class", mark="route", classes=True, **AS_SENT
    ),
    "mooncake": _format("timestamp/input_length/output_length", ticks=1000, hashed=512),
    "qwen": _format("timestamp/input_length/output_length", mark="chat_id", hashed=16),
    "vidur": _format(VIDUR, json=False, clock=as_written, lengths_only=True, any_unit=True),
    "vtc": _format(VIDUR, json=False, client="client"),
}
# Columns that say what a request shares with others; any format may have them.
SHARING = ("hash_ids", "chat_id", "parent_chat_id", "prefix", "prefix_tokens", "session", "cached")
NOTHING_SHARED: Mapping[str, object] = {}


class Fields(NamedTuple):
    """What one row says, not yet understood; the arrival is None in a file without arrivals."""

    arrival: object
    prompt: object
    output: object
    client: str | None = None
    sharing: Mapping[str, object] = NOTHING_SHARED  # those of SHARING that the row has
    tenant: str = ""


# The line number, and the fields or the reason why there are none.
Row = tuple[int, Fields | str]


def choose(path: str, text: str, name: str | None) -> str:
    """The name of the format: the one asked for, or the one that fits the first line best."""
    if name is not None:
        if name not in FORMATS:
            raise unknown("trace format", name, FORMATS)
        return name
    if not (found := fitting(text)):
        columns = header_of(text)
        raise InputError(
            f"{path}:1: not a known trace format ({', '.join(FORMATS)}); "
            f"say which column is which with --columns {_to_paste(columns)}; it has {_few(columns)}"
        )
    return max(found, key=lambda known: len(FORMATS[known].required()))


def fitting(text: str) -> list[str]:
    if tool := recognised(text):
        return [tool]
    is_json, columns = is_json_lines(text), header_of(text)
    return [
        known
        for known, format in FORMATS.items()
        if format.json == is_json and known not in TOOLS and {*format.required()} <= {*columns}
    ]


ALIASES = {  # of the roles of columns, as logs call them, in small letters and with _ for spaces
    "arrival": "arrival arrival_time arrived_at received_at created_at created start_time timestamp time ts",
    "prompt": "prompt prompt_tokens prompt_length prompt_len input input_tokens input_length input_len",
    "output": "output output_tokens output_length output_len completion_tokens generated_tokens",
    "class": "class",
    "tenant": "tenant tenant_id",
    "session": "session session_id conversation_id",
    "prefix": "prefix",
    "prefix_tokens": "prefix_tokens",
}


LIKELY = {"prompt": "(^|_)in", "output": "(^|_)out"}  # what the name of such a column often has
LIKELY |= {"tenant": "(^|_)(account|customer|department|dept|org|organi[sz]ation|project|team|user)(_id|$)"}


def named_roles(header: Sequence[str]) -> dict[str, str]:
    """The columns that a header names by themselves, by role."""
    plain = {column.lower().replace(" ", "_"): column for column in reversed(header)}
    found = ((role, next(filter(plain.get, names.split()), "")) for role, names in ALIASES.items())
    return {role: plain[name] for role, name in found if name}


def _to_paste(header: Sequence[str]) -> str:
    """Columns that are not recognised stand for the roles that are left, in order."""
    named = named_roles(header)
    left = [column for column in header if column not in named.values()]
    for role, sign in LIKELY.items():
        likely = (column for column in left if role not in named and re.search(sign, column.lower()))
        if column := next(likely, ""):
            named[role] = column
            left.remove(column)
    rest = iter(left)
    roles = [*list(ALIASES)[:3], *(["tenant"] if "tenant" in named else [])]
    return ",".join(f"{role}={named.get(role, '') or next(rest, '..')[:40]}" for role in roles)


def rows(path: str, text: str, name: str, chosen: Format) -> Iterator[Row]:
    # With --columns, only a named column of tenants is read
    owner = chosen.tenant or ("" if name == COLUMNS else TENANT)
    if name == AIPERF:
        yield from _aiperf(text)
    elif name in (GUIDELLM, VLLM):
        whole = parse_line(text)
        if whole is None:
            raise InputError(f"{path}: not one JSON object; keep one result of {name} in the file")
        yield from (_vllm(path, whole) if name == VLLM else _guidellm(path, whole))
    elif chosen.json:
        yield from _json_rows(text, chosen, owner)
    else:
        yield from _csv_rows(path, text, name, chosen, owner)


def is_json_lines(text: str) -> bool:
    return text.lstrip().startswith("{")


def header_of(text: str) -> Sequence[str]:
    first = text.lstrip().splitlines()[0]
    return list(parse_line(first) or ()) if is_json_lines(text) else _stripped(first.split(_separator(first)))


def _few(columns: Sequence[str]) -> str:
    return ", ".join(columns[:12]) + (", ..." if len(columns) > 12 else "") if columns else "no columns"


def _csv_rows(path: str, text: str, name: str, chosen: Format, owner: str) -> Iterator[Row]:
    """Rows of CSV, read by the names in the header: releases of one trace order their columns differently."""
    first = text.lstrip().split("\n", 1)[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(first))
    try:
        header: list[str] = next((_stripped(row) for row in reader if row), [])
        for need in chosen.required():
            if need not in header:
                raise InputError(
                    f"{path}:1: no column {need!r}; {name} needs {', '.join(chosen.required())}, "
                    f"the file has {_few(header)}"
                )
        place = {column: number for number, column in reversed([*enumerate(header)])}
        arrival, client, tenant = (place.get(column) for column in (chosen.arrival, chosen.client, owner))
        prompt, output = place[chosen.prompt], place[chosen.output]
        sharing = [(name, place[column]) for name, column in chosen.sharing().items() if column in place]
        for row in reader:
            if len(row) == len(header):
                when, whose = (None if at is None else row[at] for at in (arrival, client))
                shared = {key: row[at].strip() for key, at in sharing if row[at].strip()}
                team = "" if tenant is None else row[tenant].strip()
                fields = Fields(when, row[prompt], row[output], whose and whose.strip(), shared, team)
                yield reader.line_num, fields
            elif row:
                yield reader.line_num, f"{len(row)} fields where the header has {len(header)}"
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: broken CSV, {error}; fix the line") from None


def _json_rows(text: str, chosen: Format, owner: str) -> Iterator[Row]:
    """Rows of JSON lines; a missing key becomes None, which no field reader accepts."""
    columns = chosen.sharing().items()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = parse_line(line)
        if record is None:
            yield number, "not a JSON object"
        else:
            get = record.get
            client, tenant = (get(column) if column else None for column in (chosen.client, owner))
            whose = str(client) if isinstance(client, str | int) else None
            sharing = {name: record[key] for name, key in columns if record.get(key) is not None}
            times = (get(chosen.arrival), get(chosen.prompt), get(chosen.output))
            yield number, Fields(*times, whose, sharing, str(tenant) if isinstance(tenant, str | int) else "")


def _separator(header: str) -> str:
    """Spreadsheets of many countries write semicolons, databases tabs."""
    return max(",;\t", key=header.count)


def _stripped(cells: Sequence[str]) -> list[str]:
    return [cell.strip().strip('"') for cell in cells]


# -- result files of benchmark tools

STARTS = ("request_start_time", "start_time")  # of a request, by GuideLLM's releases


def recognised(text: str) -> str | None:
    if not is_json_lines(text):
        return None
    line = parse_line(text.lstrip().split("\n", 1)[0]) or {}
    if "request_start_ns" in _table(line.get("metadata")):  # a failed request has no metrics
        return AIPERF
    if not any(word in text for word in ('"input_lens"', '"request_throughput"', '"benchmarks"')):
        return None
    whole = parse_line(text) or line  # --append-result writes an object per line
    if "input_lens" in whole or "request_throughput" in whole:
        return VLLM
    return GUIDELLM if isinstance(whole.get("benchmarks"), list) else None


def _vllm(path: str, whole: Mapping[str, Any]) -> Iterator[Row]:
    columns = [whole.get(name) for name in ("start_times", "input_lens", "output_lens")]
    if not all(isinstance(column, list) for column in columns) or len({len(c) for c in columns if c}) > 1:
        raise InputError(f"{path}: no start_times, input_lens and output_lens; run it with --save-detailed")
    for number, values in enumerate(zip(*columns, strict=True), 1):
        yield number, Fields(*values)


def _aiperf(text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        record = parse_line(line) or {}
        metrics = _table(record.get("metrics"))
        prompt, output = (
            _table(metrics.get(f"{which}_sequence_length")).get("value") for which in ("input", "output")
        )
        yield number, Fields(_table(record.get("metadata")).get("request_start_ns"), prompt, output)


def _guidellm(path: str, whole: Mapping[str, Any]) -> Iterator[Row]:
    runs = whole["benchmarks"]
    if len(runs) != 1:
        raise InputError(f"{path}: {len(runs)} benchmarks, at different loads; keep one of them in the file")
    run = _table(runs[0])
    done = _table(run.get("requests")).get("successful")
    if not isinstance(done, list):
        raise InputError(f"{path}: no benchmarks[0].requests.successful; write it with all requests")
    counted = _table(run.get("request_totals") or _table(run.get("metrics")).get("request_totals"))
    every = counted.get("successful")
    if isinstance(every, int) and every > len(done):
        raise InputError(
            f"{path}: a sample of {len(done)} of {every} requests, too few for their rate; run GuideLLM "
            "without sampling of requests"
        )
    for number, request in enumerate(map(_table, done), 1):
        start = next((request[name] for name in STARTS if name in request), None)
        yield number, Fields(start, request.get("prompt_tokens"), request.get("output_tokens"))


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


# -- arrival times in an unknown unit

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # in a second
WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
SINCE_1970 = {"ns": 1e17, "us": 1e14, "ms": 1e11, "s": 1e9}  # the least number of each unit from 1973 on
# Mean distance of whole numbers from which on they are read as a smaller unit: no trace is that slow
LEAST_GAP = {"ns": 1e9, "us": 1e6, "ms": 10.0}


class Unit(NamedTuple):
    """The unit of a column of times, whether it is a calendar's, and why we think so ("": nothing to say)."""

    ticks: float  # in a second
    calendar: bool = False
    said: str = ""


def unit_of(times: Sequence[float], wanted: str = "") -> Unit:
    least, most = min(times), max(times)
    since = next((name for name, start in SINCE_1970.items() if least >= start), None)
    if wanted:
        if wanted not in UNITS:
            raise unknown("unit of time", wanted, UNITS)
        if any(isinstance(time, int) for time in times):  # see `as_written`
            raise InputError(f"--times {wanted}, but the arrivals are dates; drop --times")
        return Unit(UNITS[wanted], since is not None)
    if since is not None:
        unit = "" if since == "ns" else f", {WORDS[since]} since 1970"
        return Unit(UNITS[since], True, f"arrivals are read as dates{unit}")
    gap = (most - least) / max(len(times) - 1, 1)
    name = next((name for name, least in LEAST_GAP.items() if gap >= least), "s")
    if name == "s" or any(time != int(time) for time in times):
        return Unit(UNITS["s"])
    rate = f"as seconds they would be {1 / gap:.2g} requests/s"
    return Unit(UNITS[name], False, f"arrivals are read as {WORDS[name]}: {rate}; --times s says otherwise")


# -- files, plain or gzip

_GZIP_MAGIC = b"\x1f\x8b"


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file, unpacked when it is gzip (detected by its content, not by its name)."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; name a file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read, {reason}; check the path and its permissions") from None
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        raise InputError(f"{path}: damaged gzip file; fetch it again") from None


def as_text(path: str | os.PathLike[str], content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{path}: not a text file; give CSV or JSON lines, plain or gzip")
    if not text.strip():
        raise InputError(f"{path}: the file is empty; give one with requests in it")
    return text
