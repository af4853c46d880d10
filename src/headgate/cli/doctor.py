"""`headgate doctor`: what is installed, what is there to choose from."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from headgate import __version__
from headgate.cli.output import check_json, write_json

NEEDED = ("numpy", "scipy", "pydantic", "typer", "rich")
OPTIONAL = {"vllm": "the scheduler plug-in (not part of this release)"}


def doctor(
    json: Annotated[str | None, typer.Option(help="as JSON, to a file or - for stdout")] = None,
) -> None:
    """Say which versions are here, and which policies, cards and traces there are to choose from.

    Example: headgate doctor --json -
    """
    check_json(json)
    found = _findings()
    write_json(json, found)
    if json == "-":
        return
    print(f"headgate {found['headgate']} on Python {found['python']}, {found['machine']}")
    for name, installed in found["packages"].items():
        print(f"  {name:10} {installed}")
    for title in ("policies", "cards", "traces"):
        print(f"{title}:")
        for name, about in found[title].items():
            print(f"  {name:32} {about}")


def _findings() -> dict[str, Any]:
    from headgate.cost.card import list_cards, load_card
    from headgate.policies import BATCH
    from headgate.workloads.bundled import BUNDLED

    packages = {name: _installed(name) for name in NEEDED}
    packages |= {name: f"{_installed(name)} - {use}" for name, use in OPTIONAL.items()}
    return {
        "headgate": __version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": packages,
        "policies": {name: (kind.__doc__ or "").strip().splitlines()[0] for name, kind in BATCH.items()},
        "cards": {name: load_card(name).description for name in list_cards()},
        "traces": dict(BUNDLED),
    }


def _installed(name: str) -> str:
    if find_spec(name) is None:
        return "not installed"
    try:
        return version(name)
    except PackageNotFoundError:
        return "installed, version unknown"
