"""Is the wheel complete? Its files, version and metadata, and the program in a bare environment elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from validate_pyproject import api, errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "headgate"
SKIPPED = (".pyc", ".pyo")


def wanted(package: Path) -> set[str]:
    """Every file of the package, code and data, as the wheel names it."""
    files = (path for path in package.rglob("*") if path.is_file() and path.suffix not in SKIPPED)
    return {path.relative_to(package.parent).as_posix() for path in files}


def missing_in_wheel(wheel: Path, package: Path) -> list[str]:
    """Files of the package that the wheel does not have."""
    with ZipFile(wheel) as archive:
        return sorted(wanted(package) - set(archive.namelist()))


def missing_in_sdist(sdist: Path, package: Path) -> list[str]:
    """Files of the package, and pages that belong to a release, that the source archive does not have."""
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    pages = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml"}
    return sorted(({f"src/{name}" for name in wanted(package)} | pages) - inside)


def version_of(wheel: Path) -> str:
    """The version in the wheel's metadata."""
    found = re.search(r"^Version: (.+)$", metadata(wheel).decode(), re.M)
    assert found, f"{wheel.name} has no version"
    return found[1].strip()


def metadata(wheel: Path) -> bytes:
    """The wheel's METADATA."""
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(name)


def wrong_metadata(found: bytes) -> list[str]:
    """What an index would refuse; packaging's rules are the index's own."""
    try:
        Metadata.from_email(found)
    except ExceptionGroup as group:
        return [f"metadata: {error}" for error in group.exceptions]
    return []


def wrong_project(text: str) -> list[str]:
    """What a pyproject.toml should not say; classifiers must exist."""
    try:
        api.Validator()(tomllib.loads(text))
    except errors.ValidationError as error:
        return [f"pyproject.toml: {error.message}"]
    return []


def cited_version(citation: Path) -> str:
    """The version in CITATION.cff."""
    found = re.search(r"^version: (.+)$", citation.read_text(), re.M)
    return found[1].strip() if found else ""


def disagreement(versions: dict[str, str]) -> list[str]:
    """One line that names all versions if they are not all the same."""
    said = ", ".join(f"{where} says {version}" for where, version in versions.items())
    return [f"versions differ: {said}"] if len(set(versions.values())) > 1 else []


def run(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder` without the modules of this one."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False)


def install(wheel: Path, folder: Path) -> Path:
    """A bare environment with the wheel and its dependencies (our pins): the path of its `headgate`."""
    venv.create(folder / "venv", with_pip=True)
    pip = folder / "venv" / "bin" / "pip"
    pins = ROOT / "requirements-dev.txt"
    ran = run([pip, "install", "--quiet", "--constraint", pins, wheel.resolve()], folder)
    assert ran.returncode == 0, f"pip install {wheel.name}:\n{ran.stderr}"
    return folder / "venv" / "bin" / "headgate"


def try_program(headgate: Path, folder: Path) -> list[str]:
    """Runs a few commands in `folder`, the router's settings among them; what went wrong."""
    wrong = []
    route = "route --engine http://127.0.0.1:9 --check"
    for command, sign in (("doctor", "azure-conv"), ("demo", "report: "), (route, "http://127.0.0.1:9")):
        ran = run([headgate, *command.split()], folder)
        if ran.returncode or sign not in ran.stdout:
            wrong.append(f"headgate {command}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
    reports = list(folder.glob("runs/*/report.html"))
    return wrong if reports else [*wrong, "headgate demo wrote no report"]


def try_packages(headgate: Path, folder: Path) -> list[str]:
    """Commands of packages of their own: refused in one line, then installed and run; what went wrong."""
    wrong = []
    board = ROOT / "leaderboard" / "policies.toml"
    for package, command, sign in (
        ("papers", "reproduce", "eb-table3"),
        ("leaderboard", f"leaderboard --known --board {board}", "Capacity"),
    ):
        ran = run([headgate, *command.split()], folder)
        if ran.returncode != 2 or f"pip install ./{package}" not in ran.stderr:
            wrong.append(f"headgate {command}, not installed: exit code {ran.returncode}\n{ran.stderr}")
        pip = headgate.with_name("pip")
        ran = run([pip, "install", "--quiet", "--no-deps", ROOT / package], folder)
        assert ran.returncode == 0, f"pip install ./{package}:\n{ran.stderr}"
        ran = run([headgate, *command.split()], folder)
        if ran.returncode or sign not in ran.stdout:
            wrong.append(f"headgate {command}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return wrong


def main() -> int:
    """Exit code 1 and a list if something is missing or does not run."""
    dist = Path(sys.argv[1])
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    wrong = [f"{wheel.name} lacks {name}" for name in missing_in_wheel(wheel, PACKAGE)]
    wrong += [f"{sdist.name} lacks {name}" for name in missing_in_sdist(sdist, PACKAGE)]
    wrong += wrong_metadata(metadata(wheel)) + wrong_project((ROOT / "pyproject.toml").read_text())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        headgate = install(wheel, folder)
        versions = {
            wheel.name: version_of(wheel),
            "CITATION.cff": cited_version(ROOT / "CITATION.cff"),
            "headgate --version": run([headgate, "--version"], folder).stdout.split()[-1],
        }
        wrong += disagreement(versions) + try_program(headgate, folder) + try_packages(headgate, folder)
    for line in wrong:
        print(line)
    print(f"{wheel.name}: {len(wanted(PACKAGE))} files, version {version_of(wheel)}, {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
