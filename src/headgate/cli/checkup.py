"""What of the installed vLLM is as we expect it, and what headgate would do in it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from headgate.core.errors import InputError

LOOK = "import json; from headgate.live.vllm.seams import faults; print(); print(json.dumps(faults()))"
PATIENCE = 240.0  # seconds to import vLLM on a slow machine
TICK = 0.5  # seconds between two signs of life


def checkup(seams: bool = True) -> dict[str, Any]:
    """Findings in words, and a list of problems."""
    from headgate.live.vllm.seams import installed

    problems: list[str] = []
    release = installed()
    return {
        "version": _version(release, problems),
        "command": _command(),
        "seams": _seams(problems) if release and seams else "not looked at",
        **_settings(problems),
        "problems": problems,
    }


def _version(release: str | None, problems: list[str]) -> str:
    from headgate.live.vllm.seams import release_numbers, unsupported

    if release is None:
        return "not installed; needed for headgate serve only"
    why = unsupported(release_numbers(release))
    if why:
        problems.append(why)
    return f"{release}, {'not supported' if why else 'supported'}"


def _command() -> str:
    from headgate.cli.serve import executable

    return executable() or "no vllm command beside this Python or on the path"


def _seams(problems: list[str]) -> str:
    """Import vLLM elsewhere and look at every name and signature we rely on."""
    began = time.monotonic()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", LOOK], **pipes)
    try:
        while (waited := time.monotonic() - began) < PATIENCE:
            try:
                out, err = child.communicate(timeout=TICK)
                break
            except subprocess.TimeoutExpired:
                _sign_of_life(waited)
        else:
            problems.append(f"importing vLLM took more than {PATIENCE:.0f} s; try again, or --no-seams")
            return "unknown"
    finally:
        child.kill()
        if child.returncode is None:
            child.communicate()  # also closes its pipes
        _sign_of_life(None)
    if child.returncode:
        last = (err.strip().splitlines() or ["no reason given"])[-1]
        problems.append(f"vLLM cannot be imported: {last}; install it again")
        return "unknown"
    faults: list[str] = json.loads(out.splitlines()[-1])
    problems += [f"vLLM has changed: {fault}" for fault in faults]
    return f"{len(faults)} not as expected" if faults else "as expected"


def _sign_of_life(seconds: float | None) -> None:
    """On a terminal: how long it has been going on; None wipes that out again."""
    if sys.stderr.isatty():
        text = "" if seconds is None else f"importing vLLM to look at its seams, {seconds:.0f} s ..."
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _settings(problems: list[str]) -> dict[str, str]:
    """What HEADGATE_CONFIG says, and what an engine started now with our scheduler would do."""
    from headgate.live.engine.policy import check_policy
    from headgate.live.engine.settings import FILE, file_of, read_settings
    from headgate.live.vllm import VLLM

    path = file_of()
    said = "HEADGATE_CONFIG is not set" if path is None else f"{FILE}={path}"
    if path is None:
        return {"settings": said, "active": "nothing by itself; headgate serve sets a policy"}
    try:
        settings = read_settings()
        check_policy(settings, VLLM)
    except InputError as error:
        problems.append(str(error))
        return {
            "settings": f"{said}, wrong",
            "active": "nothing; vLLM would refuse to start with our scheduler",
        }
    name, words = settings.named()
    parameters = ", ".join(f"{word}={value}" for word, value in words.items())
    return {
        "settings": f"{said}, valid",
        "active": f"policy {name}({parameters}), card {settings.card or 'none'}",
    }
