"""A trace with columns of any name, as a user names them: arrival=ts,prompt=input,output=out,class=tenant."""

from __future__ import annotations

from headgate.core.errors import InputError, unknown
from headgate.workloads.formats import Format, header_of, is_json_lines
from headgate.workloads.times import as_written

ROLES = ("arrival", "prompt", "output", "class")
FORM = "write arrival=COLUMN,prompt=COLUMN,output=COLUMN[,class=COLUMN]"


def named_as_roles(text: str) -> str:
    """The list of columns of a CSV file whose header names the roles themselves; "" for any other file."""
    columns = [] if is_json_lines(text) else header_of(text)
    here = [role for role in ROLES if role in columns]
    return ",".join(f"{role}={role}" for role in here) if {"arrival", "prompt", "output"} <= set(here) else ""


def own_format(text: str, json: bool) -> Format:
    """The format that a list of columns describes; without an arrival it is one of lengths alone."""
    named: dict[str, str] = {}
    for part in text.split(","):
        role, equals, column = (each.strip() for each in part.partition("="))
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
    return Format(
        json,
        named.get("arrival", "arrival"),
        named["prompt"],
        named["output"],
        clock=as_written,
        lengths_only="arrival" not in named,
        client=named.get("class", ""),
        classes=True,
        unsorted=True,
        any_unit=True,
    )
