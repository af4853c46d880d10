"""`headgate doctor`: what is installed, what is there to choose from, what would run inside vLLM."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from headgate.cli.output import check_json, write_json
from headgate.core.version import VERSION

NEEDED = ("numpy", "scipy", "pydantic", "typer", "rich")
OPTIONAL = {"prometheus_client": "metrics inside vLLM"}


def doctor(
    json: Annotated[str | None, typer.Option(help="as JSON, to a file or - for stdout")] = None,
    seams: Annotated[
        bool, typer.Option(help="import vLLM and look at what we rely on; takes a while")
    ] = True,
) -> None:
    """Say which versions are here, what there is to choose from, and what would run inside vLLM.

    Exit code 1 when something of vLLM or of the settings is not as it should be.

    Example: headgate doctor --json -
    """
    from headgate.cli.checkup import checkup

    check_json(json)
    found = _findings() | {"vllm": checkup(seams)}
    write_json(json, found)
    if json != "-":
        _print(found)
    if found["vllm"]["problems"]:
        raise typer.Exit(1)


def _print(found: dict[str, Any]) -> None:
    print(f"headgate {found['headgate']} on Python {found['python']}, {found['machine']}")
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


def _findings() -> dict[str, Any]:
    from headgate.cost.card import list_cards, load_card
    from headgate.methods.names import BATCH, ROUTE
    from headgate.workloads.bundled import BUNDLED

    packages = {name: _installed(name) for name in NEEDED}
    packages |= {name: f"{_installed(name)} - {use}" for name, use in OPTIONAL.items()}
    return {
        "headgate": VERSION,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": packages,
        "policies": {name: _first_line(kind) for name, kind in BATCH.items()},
        "routers": {name: _first_line(kind) for name, kind in ROUTE.items()},
        "cards": {name: load_card(name).description for name in list_cards()},
        "traces": dict(BUNDLED),
    }


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _installed(name: str) -> str:
    if find_spec(name) is None:
        return "not installed"
    try:
        return version(name)
    except PackageNotFoundError:
        return "installed, version unknown"
