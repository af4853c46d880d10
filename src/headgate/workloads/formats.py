"""The published trace formats: which columns hold what, and the rows of a file in each."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from headgate.core.errors import InputError, unknown
from headgate.workloads.benchmark_files import AIPERF, GUIDELLM, VLLM, recognised, requests_of
from headgate.workloads.text import nanoseconds, seconds
from headgate.workloads.times import as_written


class Format(NamedTuple):
    """Where a trace format keeps the arrival, the lengths and the client of a request.

    Attributes:
        json: one JSON object per line; otherwise CSV with a header, read by name.
        arrival: the column of the arrival time.
        prompt: the column of the prompt length.
        output: the column of the output length.
        clock: how one arrival time is read.
        ticks: units of that clock in a second.
        calendar: whether the clock is a calendar, so that the first request sets the start.
        lengths_only: whether files without arrivals exist.
        client: the column that names a client.
        mark: a column that distinguishes the format from others with the same ones.
        classes: whether clients are classes of requests, which keep their names.
        unsorted: whether rows come in another order than requests arrived, and are sorted when read.
        hashed: tokens that one entry of `hash_ids` stands for; 0: the format has none.
        any_unit: whether times may be in any unit, which is told by their size (`times.py`).
    """

    json: bool
    arrival: str
    prompt: str
    output: str
    clock: Callable[[object, str], float] = seconds
    ticks: float = 1
    calendar: bool = False
    lengths_only: bool = False
    client: str = ""
    mark: str = ""
    classes: bool = False
    unsorted: bool = False
    hashed: int = 0
    any_unit: bool = False

    def required(self) -> list[str]:
        """The columns a file must have."""
        needed = [self.prompt, self.output]
        if not self.lengths_only:
            needed.insert(0, self.arrival)
        return needed + [name for name in (self.client, self.mark) if name]


FORMATS: dict[str, Format] = {
    AIPERF: Format(
        True,
        "request_start_ns",
        "input_sequence_length",
        "output_sequence_length",
        ticks=1_000_000_000,
        calendar=True,
        unsorted=True,
    ),
    GUIDELLM: Format(True, "start_time", "prompt_tokens", "output_tokens", calendar=True, unsorted=True),
    VLLM: Format(True, "start_times", "input_lens", "output_lens", calendar=True, unsorted=True),
    "servegen-offline": Format(
        True, "arrival", "input_length", "output_length", lengths_only=True, mark="request_id"
    ),
    "azure": Format(
        False,
        "TIMESTAMP",
        "ContextTokens",
        "GeneratedTokens",
        clock=nanoseconds,
        ticks=1_000_000_000,
        calendar=True,
    ),
    "burstgpt": Format(False, "Timestamp", "Request tokens", "Response tokens"),
    "headgate-route": Format(
        True,
        "arrival",
        "prompt",
        "replay_output",
        client="class",
        mark="route",
        classes=True,
        calendar=True,
        unsorted=True,
    ),
    "mooncake": Format(True, "timestamp", "input_length", "output_length", ticks=1000, hashed=512),
    "qwen": Format(True, "timestamp", "input_length", "output_length", mark="chat_id", hashed=16),
    "vidur": Format(
        False,
        "arrived_at",
        "num_prefill_tokens",
        "num_decode_tokens",
        clock=as_written,
        lengths_only=True,
        any_unit=True,
    ),
    "vtc": Format(False, "arrived_at", "num_prefill_tokens", "num_decode_tokens", client="client"),
}


# Columns that say what a request shares with others; any format may have them.
SHARING = ("hash_ids", "chat_id", "parent_chat_id", "prefix", "prefix_tokens", "session", "cached")
NOTHING_SHARED: Mapping[str, object] = {}


class Fields(NamedTuple):
    """What one row says, not yet understood; the arrival is None in a file without arrivals."""

    arrival: object
    prompt: object
    output: object
    client: str | None
    sharing: Mapping[str, object] = NOTHING_SHARED  # those of SHARING that the row has


# The line number, and the fields or the reason why there are none.
Row = tuple[int, Fields | str]


def choose(path: str, text: str, name: str | None) -> str:
    """The name of the format: the one asked for, or the one that fits the first line best."""
    if name is not None:
        if name not in FORMATS:
            raise unknown("trace format", name, FORMATS)
        return name
    if tool := recognised(text):
        return tool
    is_json = is_json_lines(text)
    columns = header_of(text)
    fitting = [
        known
        for known, each in FORMATS.items()
        if each.json == is_json and all(need in columns for need in each.required())
    ]
    if not fitting:
        raise InputError(
            f"{path}:1: not a known trace format ({', '.join(FORMATS)}); "
            f"say which column is which with --columns arrival=..,prompt=..,output=..; it has {_few(columns)}"
        )
    return max(fitting, key=lambda known: len(FORMATS[known].required()))


def rows(path: str, text: str, name: str, chosen: Format) -> Iterator[Row]:
    """Every row of the file that is not blank."""
    if name in (AIPERF, GUIDELLM, VLLM):
        for number, *fields in requests_of(path, text, name):
            yield number, Fields(fields[0], fields[1], fields[2], None)
    elif chosen.json:
        yield from _json_rows(text, chosen)
    else:
        yield from _csv_rows(path, text, name, chosen)


def is_json_lines(text: str) -> bool:
    """Whether a file holds JSON, not CSV."""
    return text.lstrip().startswith("{")


def header_of(text: str) -> Sequence[str]:
    """The columns that the first line names."""
    first = text.lstrip().splitlines()[0]
    return _keys(first) if is_json_lines(text) else _header(first)


def _few(columns: Sequence[str]) -> str:
    return ", ".join(columns[:12]) + (", ..." if len(columns) > 12 else "") if columns else "no columns"


def _csv_rows(path: str, text: str, name: str, chosen: Format) -> Iterator[Row]:
    """Rows of CSV, read by the names in the header: releases of one trace order their columns differently."""
    first = text.lstrip().split("\n", 1)[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(first))
    try:
        header: list[str] = next((_stripped(row) for row in reader if row), [])
        arrival, prompt, output, client = _places(path, header, name, chosen)
        timed, named = arrival < len(header), client < len(header)
        sharing = [(name, header.index(name)) for name in SHARING if name in header]
        for row in reader:
            if len(row) == len(header):
                yield (
                    reader.line_num,
                    Fields(
                        row[arrival] if timed else None,
                        row[prompt],
                        row[output],
                        row[client].strip() if named else None,
                        {each: row[place].strip() for each, place in sharing if row[place].strip()}
                        if sharing
                        else NOTHING_SHARED,
                    ),
                )
            elif row:
                yield reader.line_num, f"{len(row)} fields where the header has {len(header)}"
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: broken CSV, {error}; fix the line") from None


def _places(path: str, header: Sequence[str], name: str, chosen: Format) -> list[int]:
    """Where arrival, prompt, output and client stand in a row; one past its end when the file has none."""
    for need in chosen.required():
        if need not in header:
            raise InputError(
                f"{path}:1: no column {need!r}; {name} needs {', '.join(chosen.required())}, "
                f"the file has {_few(header)}"
            )
    wanted = (chosen.arrival, chosen.prompt, chosen.output, chosen.client)
    return [header.index(each) if each in header else len(header) for each in wanted]


def _json_rows(text: str, chosen: Format) -> Iterator[Row]:
    """Rows of JSON lines; a missing key becomes None, which no field reader accepts."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            yield number, "not a JSON object"
        else:
            get = record.get
            client = get(chosen.client) if chosen.client else None
            told = str(client) if isinstance(client, str | int) else None
            sharing = {name: record[name] for name in SHARING if record.get(name) is not None}
            yield number, Fields(get(chosen.arrival), get(chosen.prompt), get(chosen.output), told, sharing)


def _record(line: str) -> dict[str, object] | None:
    """One JSON object, or None for anything else (nesting without end included)."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _keys(line: str) -> Sequence[str]:
    return list(_record(line) or ())


def _header(line: str) -> Sequence[str]:
    return _stripped(line.split(_separator(line)))


def _separator(header: str) -> str:
    """Spreadsheets of many countries write semicolons, databases tabs."""
    return max(",;\t", key=header.count)


def _stripped(cells: Sequence[str]) -> list[str]:
    return [cell.strip().strip('"') for cell in cells]
