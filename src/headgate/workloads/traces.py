"""A trace file as a workload: rows that are good, their columns, and what they share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from headgate.core.errors import InputError, unknown
from headgate.workloads import formats
from headgate.workloads.formats import BadFieldError, Fields, Format, header_of, is_json_lines, tokens
from headgate.workloads.workload import PRIVATE, Contents, Kind, Piece, Workload, of_hashes

SHOWN = 5  # bad rows that are kept to be shown; the others are only counted


@dataclass(frozen=True)
class BadRows:
    count: int = 0
    first: tuple[tuple[int, str], ...] = ()


# One good row: its arrival in ticks of the format's clock, lengths, client, what it shares, and its tenant.
GoodRow = tuple[float, int, int, str, Mapping[str, object], str]


def read_trace(
    path: str | os.PathLike[str],
    format: str | None = None,
    skip_bad_rows: bool = False,
    columns: str = "",
    times: str = "",
) -> tuple[Workload, BadRows]:
    r"""Reads a published trace, plain or gzip.

    A file of lengths alone gives a workload that is there all at once, until the caller gives it arrivals
    (`arriving`) or clients (`as_closed`). Calendar times start at the first request; other clocks keep their
    own zero, so that slices of a trace mean the same as in its publication.

    Args:
        path: the file.
        format: a name in FORMATS; detected from the first line when left out.
        skip_bad_rows: leaves out rows without usable lengths or times instead of refusing the file.
        columns: which column is which: "arrival=ts,prompt=input,output=out,class=kind,tenant=team"; also
            session, prefix, prefix_tokens. Not needed where the header has usual names, such as
            created_at, prompt_tokens, output_tokens.
        times: the unit of arrivals (s, ms, us, ns) with `columns`; told from the file when left out.

    Examples:
        >>> import headgate, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "trace.csv")
        >>> _ = file.write_text(
        ...     "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
        ... )
        >>> requests, bad_rows = headgate.read_trace(file)
        >>> requests.prompt.tolist(), bad_rows.count
        ([374], 0)
    """
    content = formats.read_bytes(path)
    text = formats.as_text(path, content)
    if not columns and format is None and not formats.fitting(text):  # a header may name the roles itself
        named = formats.named_roles(header_of(text))
        if {*ROLES[:3]} <= {*named}:
            columns = ",".join(f"{role}={column}" for role, column in named.items())
    if columns:
        name, chosen = formats.COLUMNS, own_format(columns, is_json_lines(text))
    else:
        name = formats.choose(str(path), text, format)
        chosen = formats.FORMATS[name]
    if times and not chosen.any_unit:
        raise InputError(
            f"--times {times}, but the format {name} fixes its unit; drop --times or give --columns"
        )
    entries, bad = _entries(str(path), text, name, chosen, skip_bad_rows)
    origin: dict[str, object] = {"trace": Path(path).name, "format": columns or name}
    origin |= {"sha256": sha256(content).hexdigest(), "bad_rows": bad.count}
    read = {*chosen.required(), chosen.arrival, *formats.SHARING}
    if columns and (unread := [column for column in header_of(text) if column not in read]):
        origin["unread"] = f"columns that are not read and change nothing: {', '.join(unread[:12])}"
    if chosen.any_unit and not (chosen.lengths_only and not any(entry[0] for entry in entries)):
        unit = formats.unit_of([entry[0] for entry in entries], times)
        chosen = chosen._replace(ticks=unit.ticks, calendar=unit.calendar)
        origin |= {"times": unit.said} if unit.said else {}
    return _table(str(path), entries, chosen, origin), bad


def write_mooncake(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Arrivals are rounded to the millisecond; of several tenants, a column of its own says whose each is."""
    if workload.clients.any():
        raise InputError("a closed loop has no arrival times to write; give it --rate")
    stamps = np.rint(workload.arrival * 1000).astype(np.int64).tolist()
    columns = (workload.prompt, workload.output, workload.cached, workload.tenant)
    several = len(workload.tenants) > 1
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for stamp, prompt, output, cached, tenant in zip(
                stamps, *(c.tolist() for c in columns), strict=True
            ):
                record = {"timestamp": stamp, "input_length": prompt, "output_length": output, "hash_ids": []}
                more = {"cached": cached} if cached else {}
                owner = {"tenant": workload.tenants[tenant]} if several else {}
                file.write(json.dumps(record | more | owner) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written, {error.strerror}; choose another path") from None


def _entries(
    path: str, text: str, name: str, chosen: Format, skip_bad_rows: bool
) -> tuple[list[GoodRow], BadRows]:
    good, bad, zoned = list[GoodRow](), BadRows(), None
    for line, fields in formats.rows(path, text, name, chosen):
        try:
            entry = _entry(fields, chosen)
            if (known := formats.has_zone(fields)) is not None and zoned not in (known, None):
                without = "with" if known else "without"
                raise BadFieldError(f"{chosen.arrival} is {without} a time zone, unlike the rows above it")
            zoned = zoned if known is None else known
            good.append(entry)
        except BadFieldError as error:
            if not skip_bad_rows:
                raise InputError(f"{path}:{line}: {error}; fix the row or pass --skip-bad-rows") from None
            bad = BadRows(bad.count + 1, (*bad.first, (line, str(error)))[:SHOWN])
    if bad.count and not good:
        line, reason = bad.first[0]
        raise InputError(f"{path}: all {bad.count} rows are bad, line {line}: {reason}; check the format")
    if not good:
        raise InputError(f"{path}: a header and no rows; give a file with requests in it")
    return good, bad


def _entry(fields: Fields | str, chosen: Format) -> GoodRow:
    if isinstance(fields, str):
        raise BadFieldError(fields)
    arrival, prompt, output, client, sharing, tenant = fields
    for column, given in ((chosen.client, client), (chosen.tenant, tenant)):
        if column and not given:
            raise BadFieldError(f"{column} is missing")
    # Only a file of lengths alone has no arrival column; a row that lacks its arrival is bad.
    timeless = arrival is None and chosen.lengths_only
    when = 0.0 if timeless else chosen.clock(arrival, chosen.arrival)
    lengths = tokens(prompt, chosen.prompt), tokens(output, chosen.output)
    return when, *lengths, client or "", checked_sharing(sharing) if sharing else sharing, tenant


def _table(path: str, entries: list[GoodRow], chosen: Format, origin: Mapping[str, object]) -> Workload:
    ticks, prompts, outputs, clients, sharing, whose = zip(*entries, strict=True)
    start = min(ticks) if chosen.calendar else 0  # whole ticks are subtracted before they become floats
    arrival = np.array([tick - start for tick in ticks], dtype=np.float64) / chosen.ticks
    order = np.argsort(arrival, kind="stable")
    # one kind per client, the shorter names first so that client-9 comes before client-13
    senders = sorted(set(clients), key=lambda client: (len(client), client))
    prefix = "" if chosen.classes else "client-"
    kinds = [Kind(prefix + name if name else "") for name in senders]
    place = {client: number for number, client in enumerate(senders)}
    tenants = list(dict.fromkeys(whose))
    number = {tenant: place for place, tenant in enumerate(tenants)}
    contents = shared_contents(sharing, prompts, outputs, chosen.hashed)
    return Workload.of(
        np.array(prompts)[order],
        np.array(outputs)[order],
        arrival=arrival[order],
        kind=np.array([place[client] for client in clients])[order],
        kinds=kinds,
        tenant=np.array([number[tenant] for tenant in whose])[order],
        tenants=tenants,
        name=Path(path).name.split(".")[0],
        origin=origin,
        contents=None if contents is None else contents.subset(order),
        cached=np.minimum([row.get("cached", 0) for row in sharing], np.array(prompts) - 1)[order],
    )


# -- columns of any name: arrival=ts,prompt=input

SHARED = ("session", "prefix", "prefix_tokens")
ROLES = tuple(formats.ALIASES)
FORM = "write arrival=COLUMN,prompt=COLUMN,output=COLUMN, and class=, tenant=, session= where there are"


def own_format(text: str, json: bool) -> Format:
    named: dict[str, str] = {}
    for part in text.split(","):
        role, equals, column = (word.strip() for word in part.partition("="))
        if not equals or not column:
            raise InputError(f"--columns {part.strip()!r} is not ROLE=COLUMN; {FORM}")
        if role not in ROLES:
            raise unknown("role in --columns", role, ROLES)
        if role in named:
            raise InputError(f"--columns names {role} twice; drop one of the two")
        named[role] = column
    for role in ("prompt", "output"):
        if role not in named:
            raise InputError(f"--columns names no {role}; {FORM}")
    columns = named.get("arrival", "arrival"), named["prompt"], named["output"]
    format = Format(json, *columns, formats.as_written, lengths_only="arrival" not in named)
    format = format._replace(client=named.get("class", ""), tenant=named.get("tenant", ""))
    format = format._replace(shared=tuple((role, named[role]) for role in SHARED if role in named))
    return format._replace(classes=True, any_unit=True)


# -- what rows say about shared content

MOST_IDS = 1_000_000  # hash ids of one request


def checked_sharing(row: Mapping[str, object]) -> Mapping[str, object]:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(id, int | str) for id in ids):
        raise BadFieldError("hash_ids is not a list of ids")
    if len(ids) > MOST_IDS:
        raise BadFieldError(f"hash_ids has {len(ids)} ids, more than {MOST_IDS}")
    for name in ("prefix", "session", "chat_id", "parent_chat_id"):
        if not isinstance(row.get(name, ""), int | str):
            raise BadFieldError(f"{name} is neither a number nor a name")
    if "cached" in row:
        none = row["cached"] in (0, "0")
        row = {**row, "cached": 0 if none else tokens(row["cached"], "cached")}
    if "prefix" in row:
        row = {**row, "prefix_tokens": tokens(row.get("prefix_tokens"), "prefix_tokens")}
    return row


def shared_contents(
    rows: Sequence[Mapping[str, object]], prompts: Sequence[int], outputs: Sequence[int], hashed: int
) -> Contents | None:
    if any("prefix" in row or "session" in row for row in rows):
        return _named(rows, prompts)
    ids: list[list[object]] = [row.get("hash_ids", []) for row in rows]  # type: ignore[misc]
    if not hashed or not any(ids):
        return None
    return of_hashes(*_continued(rows, ids, prompts, outputs, hashed), hashed)


def _named(rows: Sequence[Mapping[str, object]], prompts: Sequence[int]) -> Contents:
    """A prefix of so many tokens, then the session's own tokens, which its outputs continue."""
    keys: dict[tuple[str, object], int] = {}

    def pieces(row: Mapping[str, object], prompt: int) -> list[Piece]:
        content: list[Piece] = []
        if "prefix" in row:
            shared = min(prompt, int(str(row["prefix_tokens"])))
            content.append((keys.setdefault(("prefix", row["prefix"]), len(keys)), shared))
            prompt -= shared
        if "session" in row:
            return [*content, (keys.setdefault(("session", row["session"]), len(keys)), prompt)]
        return [*content, (PRIVATE, prompt)]

    return Contents.of(pieces(row, prompt) for row, prompt in zip(rows, prompts, strict=True))


def _continued(
    rows: Sequence[Mapping[str, object]],
    ids: Sequence[list[object]],
    prompts: Sequence[int],
    outputs: Sequence[int],
    block: int,
) -> tuple[list[list[object]], list[int]]:
    """Ids and the tokens they cover: a request whose next turn is known has that turn's ids for its output.

    Only where the turn's prompt holds the parent's prompt and output and begins with the parent's ids. Any
    other output has no ids, and the next turn's copy of it is a miss.
    """
    longer, spans = list(ids), list(prompts)
    chats = {row["chat_id"]: number for number, row in enumerate(rows) if "chat_id" in row}
    for number, row in enumerate(rows):
        parent = chats.get(row.get("parent_chat_id"))
        if parent is None or parent == number or spans[parent] != prompts[parent]:
            continue
        whole, full = prompts[parent] + outputs[parent], prompts[parent] // block
        turn = ids[number]
        if whole <= min(prompts[number], len(turn) * block) and turn[:full] == ids[parent][:full]:
            longer[parent], spans[parent] = turn[: -(-whole // block)], whole
    return longer, spans


# -- the traces that ship with the package

BUNDLED: dict[str, str] = {
    "azure-conv": "ten minutes of Azure's 2023 conversations: 3,118 requests, 5.2 per second, "
    "mean 1,153 in and 246 out",
    "azure-code": "ten minutes of Azure's 2023 code completion: 2,146 requests, 3.6 per second in bursts, "
    "mean 1,972 in and 28 out",
    "sharegpt-8k": "lengths of ShareGPT conversations below 8k tokens, without arrivals (give --rate): "
    "30,731 requests, mean 2,340 in and 439 out",
}
_FILES = {  # and the format of each
    "azure-conv": ("azure_conv_10min.csv.gz", "azure"),
    "azure-code": ("azure_code_10min.csv.gz", "azure"),
    "sharegpt-8k": ("sharegpt_8k_lengths.csv.gz", "vidur"),
}


def bundled(name: str) -> Workload:
    if name not in _FILES:
        raise unknown("bundled trace", name, BUNDLED)
    file, format = _FILES[name]
    workload, _ = read_trace(Path(__file__).parent.parent / "data" / file, format=format)
    return replace(workload, name=name)


def bundled_format(name: str) -> str:
    return _FILES[name][1]
