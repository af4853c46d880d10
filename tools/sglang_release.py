"""Does headgate run in this release of SGLang? `python tools/sglang_release.py 0.5.22`, or `newest`.

Run it with the Python of the environment that has SGLang's scheduler (`make sglang-release`). It fetches the
release by name, unpacks its sources without installing them, says whether what we rely on is there, and runs
the suite of the scheduler against it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from headgate.live.sglang.seams import RELEASES, installed, problem

ROOT = Path(__file__).parents[1]
PIP = ("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")


def fetch(version: str, folder: Path) -> Path:
    """The folder with its sources."""
    wanted = "sglang" if version == "newest" else f"sglang=={version}"
    command = [sys.executable, *PIP, "--only-binary", ":all:", "--dest", str(folder), wanted]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    sources = folder / "sources"
    with ZipFile(wheel) as archive:
        archive.extractall(sources)
    return sources


def main() -> int:
    """0: all holds; 1: it does not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", default="newest")
    parser.add_argument("--seams-only", action="store_true", help="do not run the suite")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headgate-sglang-") as scratch:
        sources = fetch(given.version, Path(scratch))
        package = sources / "sglang"
        why = problem(package)
        release = installed(package) or "unknown"
        print(why or RELEASES.doubt(release) or f"SGLang {release}: all seams hold", flush=True)
        if why or given.seams_only:
            return int(bool(why))
        places = [str(sources), str(ROOT / "src"), str(ROOT / "papers")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
        suite = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "sglang")]
        code = subprocess.run(suite, env=environment, check=False).returncode
        print(f"SGLang {installed(package)}: {'the suite passes' if not code else 'the suite fails'}")
        return int(bool(code))


if __name__ == "__main__":
    sys.exit(main())
