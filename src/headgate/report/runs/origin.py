"""How a report was made: commands, cards, seeds, versions, outcomes, and what to be careful with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from shlex import join as shell

from headgate.core.version import VERSION
from headgate.experiment.coverage import warning
from headgate.record.tables import Run

MOST = 4  # warnings listed one by one
Facts = tuple[tuple[str, str], ...]


def made(runs: Sequence[Run], command: Sequence[str] = ()) -> Facts:
    """What one needs to do it again."""
    meta = [run.meta for run in runs]
    facts = {
        "Report": shell(["headgate", *command]) if command else "",
        "Runs": _each(shell(["headgate", *map(str, one["command"])]) for one in meta if one.get("command")),
        "Dates": _dates([str(one["date"]) for one in meta if one.get("date")]),
        "Policies": _each(_named(one, "policy", "parameters") for one in meta),
        "Routers": _each(_named(one, "router", "router_parameters") for one in meta),
        "Card": _each(_card(one) for one in meta),
        "Engine": _each(_engine(one) for one in meta),
        "Workload": _each(_workload(one) for one in meta),
        "Seeds": _each(one.get("seed") for one in meta),
        "Driver": _each(one.get("driver") for one in meta),
        "Outcome": _each(one.get("outcome") for one in meta),
        "Versions": _each(_versions(one) for one in meta),
        "Figures": f"95 % intervals; drawn by headgate {VERSION}, nothing is loaded from elsewhere",
    }
    return tuple((name, value) for name, value in facts.items() if value)


def warnings(runs: Iterable[Run]) -> tuple[str, ...]:
    """Runs that lean on a card beyond what it measured, and runs that did not come to their end."""
    found: list[str] = []
    for run in runs:
        label, outcome = run.meta.get("label", "run"), run.meta.get("outcome", "finished")
        if outcome != "finished":
            found.append(f"{label}: the run was {outcome}; figures cover what there is")
        if "card" in run.meta and "label" in run.meta and (line := warning(run)):
            found.append(line)
    told = list(dict.fromkeys(found))
    more = [f"and {len(told) - MOST} more runs like these"] if len(told) > MOST + 1 else []
    return tuple(told[:MOST] + more if more else told)


def _each(values: Iterable[object]) -> str:
    """All that differ, one after the other."""
    return "; ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))


def _dates(dates: Sequence[str]) -> str:
    """From the first to the last."""
    return " to ".join(dict.fromkeys((min(dates), max(dates)))) if dates else ""


def _named(meta: dict[str, object], name: str, settings: str) -> str:
    """A policy or a router with its parameters."""
    given = meta.get(settings)
    shown = ", ".join(f"{key}={value}" for key, value in given.items()) if isinstance(given, dict) else ""
    return f"{meta.get(name) or ''}{f' ({shown})' if shown else ''}"


def _card(meta: dict[str, object]) -> str:
    if not meta.get("card"):
        return ""
    about = ", ".join(str(meta[word]) for word in ("model", "gpu") if meta.get(word))
    source = f": {meta['provenance']}" if meta.get("provenance") else ""
    return f"{meta['card']} ({about}){source}"


def _engine(meta: dict[str, object]) -> str:
    engine = meta.get("engine")
    if not isinstance(engine, dict):
        return ""
    names = {"running": "seats", "batch_tokens": "tokens a step", "kv_tokens": "KV tokens"}
    names["max_model_len"] = "tokens a request"
    facts = [f"{engine[key]:,} {word}" for key, word in names.items() if isinstance(engine.get(key), int)]
    count = meta.get("engines")
    if isinstance(count, int) and facts:
        facts[0] = f"{count} engine{'s, each' if count > 1 else ''} with {facts[0]}"
    return ", ".join([*facts, "asynchronous scheduling"] if meta.get("asynchronous") else facts)


def _workload(meta: dict[str, object]) -> str:
    about = meta.get("workload")
    if not isinstance(about, dict):
        return ""
    plain = {key: value for key, value in about.items() if isinstance(value, str | int | float)}
    listed = ", ".join(f"{key} {value}" for key, value in plain.items() if key != "name")
    return f"{about.get('name', '')} ({listed})" if listed else str(about.get("name", ""))


def _versions(meta: dict[str, object]) -> str:
    versions = meta.get("versions")
    listed = [f"{key} {value}" for key, value in versions.items()] if isinstance(versions, dict) else []
    return ", ".join([*([f"headgate {meta['headgate']}"] if meta.get("headgate") else []), *listed])
