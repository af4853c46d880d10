"""`headgate doctor`: what is installed, what there is to choose from, what would run inside engines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from headgate.cli.output import Json, bar, write_json
from headgate.core.build import build_name
from headgate.core.errors import InputError
from headgate.core.version import VERSION

NEEDED = ("numpy", "scipy", "highspy", "pydantic", "typer", "rich", "aiohttp", "msgspec", "prometheus_client")
OPTIONAL = {
    "tokenizers": "real token counts in headgate emulate",
    "uvloop": "faster headgate route and headgate emulate",
    "pandas": "Run.to_dataframe",
    "polars": "Run.to_dataframe",
}


def doctor(
    json: Json = None,
    seams: Annotated[
        bool, typer.Option(help="import vLLM and look at what we rely on; takes a while")
    ] = True,
) -> None:
    """Say what is installed and what would run in vLLM and SGLang.

    Lists what there is to choose from, also policies and routers of installed packages (entry points
    headgate.policies, headgate.routers). Exit code 1 when something of an engine, of the settings or of such
    a package is not as it should be.

    Example: headgate doctor --json -
    """
    found = _findings() | {"vllm": checkup(seams), "sglang": sglang_checkup()}
    write_json(json, found)
    if json != "-":
        _print(found)
    if found["vllm"]["problems"] or found["sglang"]["problems"] or found["problems"]:
        raise typer.Exit(1)


def _print(found: dict[str, Any]) -> None:
    print(f"headgate {found['headgate']} ({found['build']}) on Python {found['python']}, {found['machine']}")
    for name, release in found["packages"].items():
        print(f"  {name:18} {release}")
    for engine, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        print(f"{title}:")
        for word, finding in found[engine].items():
            if word != "problems":
                print(f"  {word:18} {finding}")
        for problem in found[engine]["problems"]:
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
    from headgate.workloads.traces import BUNDLED

    problems: list[str] = []
    policies = _offered("policy", BatchPolicy, BATCH, problems)
    routers = _offered("router", RoutePolicy, ROUTE, problems)
    packages = {}
    for name in (*NEEDED, *OPTIONAL):
        try:
            packages[name] = version(name) if find_spec(name) else "not installed"
        except PackageNotFoundError:
            packages[name] = "installed, version unknown"
        packages[name] += f" - {OPTIONAL[name]}" if name in OPTIONAL else ""
    return {
        "headgate": VERSION,
        "build": build_name(),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": packages,
        "policies": policies,
        "routers": routers,
        "cards": {name: load_card(name).description for name in list_cards()},
        "traces": dict(BUNDLED),
        "problems": problems,
    }


def _offered(what: str, base: type, ours: Mapping[str, type], problems: list[str]) -> dict[str, str]:
    from headgate.methods.make import installed_class, offers, origin

    def first_line(kind: type) -> str:
        return ((kind.__doc__ or "").strip().splitlines() or ["no docstring"])[0]

    found = {name: first_line(kind) for name, kind in ours.items()}
    for point in offers(what):
        if point.name in ours:
            problems.append(f"{what} {point.name} of {origin(point)} is hidden by headgate's own; rename it")
            continue
        try:
            about = first_line(installed_class(point.name, what, base, ours))
            found[point.name] = f"{about} [{origin(point)}]"
        except InputError as error:
            problems.append(str(error))
    problems[:] = dict.fromkeys(problems)
    return found


# -- the installed vLLM, and headgate in it

LOOK = "import json; from headgate.live.vllm.seams import faults; print(); print(json.dumps(faults()))"
PATIENCE = 240.0  # seconds to import vLLM on a slow machine
AS_EXPECTED = "as expected"


def checkup(seams: bool = True) -> dict[str, Any]:
    from headgate.cli.serve import executable
    from headgate.live.vllm.seams import RELEASES, installed

    problems: list[str] = []
    release = installed()
    told = release or "not installed; needed for headgate serve only"
    doubt = RELEASES.doubt(release or "")
    if release and (why := RELEASES.problem(release)):
        problems.append(why)
        told += ", not supported"
    elif release:
        told += f", not tested ({RELEASES.tried} are)" if doubt else ", supported"
    hold = _seams(release, problems) if release and seams else "not looked at"
    if release is None:
        meaning = "headgate serve cannot run here"
    elif problems:
        meaning = "policies do not run in it: see the problems below"
    elif hold != AS_EXPECTED:
        meaning = "unknown; without --no-seams the doctor looks whether policies run in it"
    else:
        warned = ", with a warning: all they rely on is there, but it is not tested"
        meaning = f"policies run in it{warned if doubt else ''}"
    command = executable() or "no vllm command beside this Python or on the path"
    found: dict[str, Any] = {"version": told, "command": command, "seams": hold, "meaning": meaning}
    return found | _settings(problems) | {"problems": problems}


def sglang_checkup() -> dict[str, Any]:
    from headgate.live.sglang import seams

    problems: list[str] = []
    release = seams.installed()
    if release is None:
        standing = "not installed; needed for headgate serve --engine sglang only"
    elif why := seams.problem():
        problems.append(why)
        standing = f"{release}, not supported"
    else:
        standing = f"{release}, {'not tested' if seams.RELEASES.doubt(release) else 'supported'}"
    chosen = os.environ.get("SGLANG_PLUGINS")
    plug_in = "found by SGLang (entry point headgate)"
    if all(point.name != "headgate" for point in entry_points(group="sglang.srt.plugins")):
        plug_in = "not found: headgate is not installed as a package here"
    elif chosen and "headgate" not in [name.strip() for name in chosen.split(",")]:
        plug_in = "left out by SGLANG_PLUGINS"
        problems.append("SGLANG_PLUGINS does not name headgate, so SGLang would not load it; add it")
    return {"version": standing, "plug-in": plug_in, "problems": problems if release else []}


def _seams(release: str, problems: list[str]) -> str:
    from headgate.live.vllm.seams import RELEASES

    look: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE}
    try:
        with bar("importing vLLM to look at its seams", None):
            looked = subprocess.run([sys.executable, "-c", LOOK], check=False, **look)
    except subprocess.TimeoutExpired:
        problems.append(f"importing vLLM took more than {PATIENCE:.0f} s; try again, or --no-seams")
        return "unknown"
    if looked.returncode:
        last = (looked.stderr.strip().splitlines() or ["no reason given"])[-1]
        problems.append(f"vLLM cannot be imported: {last}; install it again")
        return "unknown"
    faults: list[str] = json.loads(looked.stdout.splitlines()[-1])
    if faults and (why := RELEASES.problem(release, faults)):
        problems.append(why)
    return f"{len(faults)} not as expected" if faults else AS_EXPECTED


def _settings(problems: list[str]) -> dict[str, str]:
    from headgate.live.engine.policy import check_policy
    from headgate.live.engine.settings import FILE, file_of, read_settings, where_is
    from headgate.live.vllm import VLLM

    path = file_of()
    told, active = "HEADGATE_CONFIG is not set", "nothing by itself; headgate serve sets a policy"
    if path is not None:
        try:
            settings = read_settings()
            check_policy(settings, VLLM, where=where_is(path))
            name, words = settings.named()
            parameters = ", ".join(f"{word}={value}" for word, value in words.items())
            told, active = "valid", f"policy {name}({parameters}), card {settings.card or 'none'}"
        except InputError as error:
            problems.append(str(error))
            told, active = "wrong", "nothing; vLLM would refuse to start with our scheduler"
        told = f"{FILE}={path}, {told}"
    return {"settings": told, "active": active}
