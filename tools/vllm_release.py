"""Does headgate run in this release of vLLM? `python tools/vllm_release.py 0.33.0`, or `newest`.

Run it with the Python of the environment that has vLLM's CPU build (`make vllm-release`). It fetches the
release by name, unpacks its Python sources without installing them, says what changed in all that we touch
since the newest release in the record, and runs the suites of the scheduler against them. `--record` keeps
the results, from which the table in docs/vllm.md is made.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree
from zipfile import ZipFile

from headgate.live.vllm.seams import METHODS, OUTPUT, PROMOTE, release_numbers

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tools" / "vllm_releases.json"
PAGE = ROOT / "docs" / "vllm.md"
BEGIN, END = "<!-- made by tools/vllm_release.py -->\n\n", "\n<!-- end -->\n"
SUITES = ("test_seams", "test_flags", "test_sessions", "test_oracle", "test_fallback")
KEPT = (".py", ".json", ".txt", ".jinja")
SCHED = "vllm/v1/core/sched"
# What our code calls, overrides, or must know the habits of; a class stands for its fields.
TOUCHED = {
    f"{SCHED}/scheduler.py": [
        f"Scheduler.{name}"
        for name in (
            "__init__",
            *METHODS,
            *PROMOTE,
            "_update_after_schedule",
            "_update_request_with_output",
            "_update_request_as_session",
            "_enqueue_waiting_request",
            "get_request_counts",
            "shutdown",
        )
    ],
    f"{SCHED}/async_scheduler.py": [
        f"AsyncScheduler.{name}"
        for name in ("__init__", "_update_after_schedule", "_update_request_with_output")
    ],
    f"{SCHED}/interface.py": ["SchedulerInterface", "PauseState"],
    f"{SCHED}/request_queue.py": ["RequestQueue", "FCFSRequestQueue", "PriorityRequestQueue"],
    f"{SCHED}/output.py": [*OUTPUT],
    "vllm/v1/request.py": ["Request.__init__", "RequestStatus"],
    "vllm/v1/core/kv_cache_coordinator.py": [
        "KVCacheCoordinator.find_longest_cache_hit",
        "UnitaryKVCacheCoordinator.find_longest_cache_hit",
    ],
    "vllm/v1/core/kv_cache_manager.py": [
        f"KVCacheManager.{name}" for name in ("allocate_slots", "free", "get_computed_blocks")
    ],
    "vllm/v1/core/block_pool.py": [
        f"BlockPool.{name}" for name in ("get_cached_block", "get_num_free_blocks")
    ],
    "vllm/config/scheduler.py": ["SchedulerConfig"],
}


class Symbol(NamedTuple):
    """One function or class of vLLM."""

    signature: str  # its arguments; of a class its fields and methods
    body: str  # a hash of the code without comments and docstrings
    text: str = ""  # its source; never recorded


# -- the release ------------------------------------------------------------------------------------


def fetch(version: str, folder: Path) -> tuple[str, Path]:
    """Its number, and the folder with its sources; what is there already is not fetched again."""
    sources = folder / version
    if sources.is_dir():
        return version, sources
    wanted = "vllm" if version == "newest" else f"vllm=={version}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", scratch, wanted], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        number = wheel.name.split("-")[1].partition("+")[0]
        return number, unpack(wheel, folder / number, number)


def unpack(wheel: Path, sources: Path, version: str) -> Path:
    """Its Python sources, and a word to vLLM that this is a CPU build, or it looks for a GPU."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(KEPT)]
        archive.extractall(sources, names)
    about = sources / f"vllm-{version}+cpu.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return sources


# -- what changed -----------------------------------------------------------------------------------


def symbols(sources: Path) -> dict[str, Symbol]:
    """All that we touch and this release has."""
    found: dict[str, Symbol] = {}
    for file, names in TOUCHED.items():
        path = sources / file
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
        for name in names:
            kind, _, method = name.partition(".")
            node = classes.get(kind)
            member = _member(node, method) if node and method else node
            if member is not None:
                source = ast.get_source_segment(text, member) or ""
                found[name] = Symbol(_signature(member), _body(member), source)
    return found


def _member(kind: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    if isinstance(node, ast.FunctionDef):
        return ast.unparse(node.args)
    names = [item.target.id for item in node.body if _is_field(item)]  # type: ignore[attr-defined]
    names += [
        target.id
        for item in node.body
        if isinstance(item, ast.Assign)
        for target in item.targets
        if isinstance(target, ast.Name)
    ]
    names += [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
    return ", ".join(names)


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _body(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Of its statements; strings that stand alone are documentation."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.ClassDef | ast.FunctionDef):
            inner.body = [item for item in inner.body if not _is_docstring(item)]
    text = "\n".join(map(ast.unparse, node.body))
    return sha256(text.encode()).hexdigest()[:12]


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def changes(old: dict[str, Symbol], new: dict[str, Symbol]) -> list[str]:
    """One line for each symbol that is not the same."""
    lines = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if before is None or after is None:
            lines.append(f"{name}: {'new' if before is None else 'gone'}")
        elif before.signature != after.signature:
            lines.append(f"{name}: {_words(before.signature, after.signature)}")
        elif before.body != after.body:
            lines.append(f"{name}: another body, {before.body} -> {after.body}")
    return lines


def _words(old: str, new: str) -> str:
    """Which arguments or fields came and went."""
    before, after = old.split(", "), new.split(", ")
    came = [word for word in after if word not in before]
    went = [word for word in before if word not in after]
    said = [f"with {', '.join(came)}"] * bool(came) + [f"without {', '.join(went)}"] * bool(went)
    return "; ".join(said) or "another order"


def differences(old: dict[str, Symbol], new: dict[str, Symbol]) -> str:
    """Unified differences of all that is in both."""
    text = ""
    for name in old:
        if name in new and old[name].text != new[name].text:
            before, after = old[name].text.splitlines(), new[name].text.splitlines()
            lines = difflib.unified_diff(before, after, f"old {name}", f"new {name}", lineterm="")
            text += "\n".join(lines) + "\n"
    return text


# -- what runs --------------------------------------------------------------------------------------


def run_suites(sources: Path, suites: tuple[str, ...]) -> dict[str, Any]:
    """Tests that passed, and how often which failed, by suite."""
    results: dict[str, Any] = {}
    places = [str(sources), str(ROOT / "src"), str(ROOT / "papers")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    for suite in suites:
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch, "report.xml")
            command = [sys.executable, "-m", "pytest", "-p", "no:xdist", f"--junitxml={report}"]
            subprocess.run([*command, f"tests/engine/{suite}.py"], cwd=ROOT, env=environment, check=False)
            results[suite] = read_report(report)
    return results


def read_report(report: Path) -> dict[str, Any]:
    """Counts of one suite; one that could not be collected has failed."""
    if not report.is_file():
        return {"passed": 0, "failed": {"did not run": 1}}
    passed, failed = 0, Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed[case.get("name", "").partition("[")[0]] += 1
        elif "skipped" not in outcomes:
            passed += 1
    return {"passed": passed, "failed": dict(sorted(failed.items()))}


# -- the record -------------------------------------------------------------------------------------


def read_record() -> dict[str, Any]:
    """Results by release."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    return record


def last_before(record: dict[str, Any], version: str) -> str | None:
    """The newest release in the record that is older."""
    older = [known for known in record if release_numbers(known) < release_numbers(version)]
    return max(older, key=release_numbers, default=None)


def table(record: dict[str, Any]) -> str:
    """As it stands in the documentation, newest first: tests that passed by suite, and those that failed."""
    heads = ["vLLM", *(suite.removeprefix("test_") for suite in SUITES), "failed"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for version in sorted(record, key=release_numbers, reverse=True):
        suites, failed = record[version]["suites"], Counter[str]()
        for result in suites.values():
            failed.update(result["failed"])
        passed = [str(suites[suite]["passed"]) if suite in suites else "not run" for suite in SUITES]
        names = ", ".join(f"`{name}` ({count})" for name, count in failed.items()) or "none"
        lines.append(f"| {' | '.join([version, *passed, names])} |")
    return "\n".join(lines) + "\n"


def write(record: dict[str, Any]) -> None:
    """The record, and the table on the page."""
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{table(record)}{END}{after}", encoding="utf-8")


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("version", help="such as 0.33.0, or newest")
    parser.add_argument("--folder", type=Path, help="keep sources here; default: nowhere")
    parser.add_argument(
        "--diff", action="store_true", help="show the code that changed (fetches both releases)"
    )
    parser.add_argument("--suites", default=",".join(SUITES), help="which to run, by comma; empty: none")
    parser.add_argument(
        "--record", action="store_true", help="keep results in the record and in docs/vllm.md"
    )
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch:
        folder = words.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return look(words, folder)


def look(words: argparse.Namespace, folder: Path) -> int:
    """All of it, for one release; 1 where a test failed."""
    record = read_record()
    version, sources = fetch(words.version, folder)
    new, last = symbols(sources), last_before(record, version)
    old = {name: Symbol(*pair) for name, pair in record[last]["symbols"].items()} if last else {}
    changed = changes(old, new) if last else []
    print(f"vLLM {version}: of {len(new)} symbols we touch {len(changed)} changed since {last or version}")
    print("".join(f"  {line}\n" for line in changed), end="", flush=True)
    if words.diff and last:
        print(differences(symbols(fetch(last, folder)[1]), new))
    results = run_suites(sources, tuple(filter(None, words.suites.split(","))))
    for suite, result in results.items():
        failed = ", ".join(f"{name} ({count})" for name, count in result["failed"].items()) or "none"
        print(f"{suite}: {result['passed']} passed, failed: {failed}")
    if words.record:
        kept = {name: [symbol.signature, symbol.body] for name, symbol in new.items()}
        record = read_record()  # another run may have written meanwhile
        suites = record.get(version, {}).get("suites", {}) | results
        write(record | {version: {"symbols": kept, "suites": suites}})
    return int(any(result["failed"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
