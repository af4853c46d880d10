"""`headgate doctor`: what is installed, what is there to choose from, what would run inside vLLM."""

from __future__ import annotations

import platform
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from headgate.cli.output import check_json, write_json
from headgate.core.build import compiled
from headgate.core.errors import InputError
from headgate.core.version import VERSION

NEEDED = ("numpy", "scipy", "pydantic", "typer", "rich")
OPTIONAL = {
    "prometheus_client": "metrics inside vLLM",
    "aiohttp": "headgate route and headgate emulate",
    "tokenizers": "real token counts in headgate emulate",
    "msgspec": "headgate route and headgate emulate",
    "uvloop": "faster headgate route and headgate emulate",
    "pandas": "Run.to_dataframe",
    "polars": "Run.to_dataframe",
}


def doctor(
    json: Annotated[str | None, typer.Option(help="as JSON, to a file or - for stdout")] = None,
    seams: Annotated[
        bool, typer.Option(help="import vLLM and look at what we rely on; takes a while")
    ] = True,
) -> None:
    """Say what is installed, and what would run inside vLLM.

    Lists what there is to choose from, also policies and routers of installed packages (entry points
    headgate.policies, headgate.routers). Exit code 1 when something of vLLM, of the settings or of such a
    package is not as it should be.

    Example: headgate doctor --json -
    """
    from headgate.cli.checkup import checkup

    check_json(json)
    found = _findings() | {"vllm": checkup(seams)}
    write_json(json, found)
    if json != "-":
        _print(found)
    if found["vllm"]["problems"] or found["problems"]:
        raise typer.Exit(1)


def _print(found: dict[str, Any]) -> None:
    print(f"headgate {found['headgate']} ({found['build']}) on Python {found['python']}, {found['machine']}")
    for name, installed in found["packages"].items():
        print(f"  {name:18} {installed}")
    vllm = found["vllm"]
    print("vLLM:")
    for word in ("version", "command", "seams", "settings", "active"):
        print(f"  {word:18} {vllm[word]}")
    for problem in vllm["problems"]:
        print(f"  problem: {problem}")
    for title in ("policies", "routers", "cards", "traces"):
        print(f"{title}:")
        for name, about in found[title].items():
            print(f"  {name:32} {about}")
    for problem in found["problems"]:
        print(f"problem: {problem}")


def _findings() -> dict[str, Any]:
    from headgate.core.fleet import RoutePolicy
    from headgate.core.policy import BatchPolicy
    from headgate.cost.card import list_cards, load_card
    from headgate.methods.names import BATCH, ROUTE
    from headgate.workloads.bundled import BUNDLED

    problems: list[str] = []
    policies = _offered("policy", BatchPolicy, BATCH, problems)
    routers = _offered("router", RoutePolicy, ROUTE, problems)
    packages = {name: _installed(name) for name in NEEDED}
    packages |= {name: f"{_installed(name)} - {use}" for name, use in OPTIONAL.items()}
    return {
        "headgate": VERSION,
        "build": "compiled" if compiled() else "pure Python",
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": packages,
        "policies": {name: _first_line(kind) for name, kind in BATCH.items()} | policies,
        "routers": {name: _first_line(kind) for name, kind in ROUTE.items()} | routers,
        "cards": {name: load_card(name).description for name in list_cards()},
        "traces": dict(BUNDLED),
        "problems": problems,
    }


def _offered(what: str, base: type, ours: Collection[str], problems: list[str]) -> dict[str, str]:
    """What installed packages add, by name; those that cannot be used are problems."""
    from headgate.methods.own import installed, offers, origin

    found: dict[str, str] = {}
    for point in offers(what):
        if point.name in ours:
            problems.append(f"{what} {point.name} of {origin(point)} is hidden by headgate's own; rename it")
            continue
        try:
            about = _first_line(installed(point.name, what, base, ours))
        except InputError as error:
            problems.append(str(error))
        else:
            found[point.name] = f"{about} [{origin(point)}]"
    problems[:] = dict.fromkeys(problems)
    return found


def _first_line(kind: type) -> str:
    return ((kind.__doc__ or "").strip().splitlines() or ["no docstring"])[0]


def _installed(name: str) -> str:
    if find_spec(name) is None:
        return "not installed"
    try:
        return version(name)
    except PackageNotFoundError:
        return "installed, version unknown"
