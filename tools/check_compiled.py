"""Does the compiled wheel take the same steps as plain Python? In a bare environment, outside this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_wheel import ROOT, install

WORLDS = 50
SUITES = ("tests/golden", "tests/laws", "tests/differential/test_batch_queue.py")
NEEDED = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "msgspec")


def lines(python: Path, folder: Path, pure: bool) -> list[str]:
    """What `digests.py` prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HEADGATE_PURE": "1" if pure else ""}
    command: list[str | Path] = [python, ROOT / "tools" / "digests.py", str(WORLDS)]
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def differences(compiled: list[str], pure: list[str]) -> list[str]:
    """What is not as it should be."""
    wrong = []
    if (compiled[:1], pure[:1]) != (["compiled"], ["pure Python"]):
        wrong.append(f"the builds that ran are {compiled[:1]} and {pure[:1]}")
    if len(compiled) != len(pure):
        wrong.append(f"{len(compiled)} runs compiled, {len(pure)} in plain Python")
    return wrong + [
        f"{one}, in plain Python {other}"
        for one, other in zip(compiled[1:], pure[1:], strict=False)
        if one != other
    ]


def main() -> int:
    """Exit code 1 and a list where they differ."""
    (wheel,) = Path(sys.argv[1]).glob("*.whl")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        bin = install(wheel, folder).parent
        packages = [
            ROOT / name for name in ("leaderboard", "papers")
        ]  # the laws, and baselines they run over
        subprocess.run([bin / "pip", "install", "--quiet", "--no-deps", *packages], check=True)
        with ThreadPoolExecutor() as both:
            compiled, pure = both.map(lambda pure: lines(bin / "python", folder, pure), (False, True))
        wrong = differences(compiled, pure)
        pins = ROOT / "requirements-dev.txt"
        subprocess.run([bin / "pip", "install", "--quiet", "--constraint", pins, *NEEDED], check=True)
        suites = [str(ROOT / suite) for suite in SUITES]
        pytest: list[str | Path] = [bin / "pytest", "-n", "2", "-c", ROOT / "pyproject.toml"]
        if subprocess.run([*pytest, *suites], cwd=folder).returncode:
            wrong.append(f"tests fail: {', '.join(SUITES)}")
    for line in wrong:
        print(line)
    print(f"{wheel.name}: {len(compiled) - 1} runs in {WORLDS} worlds, {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
