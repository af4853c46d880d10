"""Does headgate run in this release of vLLM? `python tools/vllm_release.py 0.33.0`, or `newest`.

Run it with the Python of the environment that has vLLM's CPU build (`make vllm-release`). It fetches the
release by name, unpacks its Python sources without installing them, says whether what we rely on is there and
what changed in all that we touch since the newest release in the record, and runs the suites of the scheduler
against it. The last line says what to do. `--record` keeps the results, from which the table in docs/vllm.md
is made.
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

from headgate.live.files import release_numbers
from headgate.live.vllm.seams import METHODS, NEWEST, OUTPUT, PROMOTE

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tools" / "vllm_releases.json"
PAGE = ROOT / "docs" / "vllm.md"
BEGIN, END = "<!-- made by tools/vllm_release.py -->\n\n", "\n<!-- end -->\n"
SUITES = (
    "test_seams", "test_flags", "test_sessions", "test_oracle", "test_oracle_catches", "test_fallback",
    "test_prefix_same", "test_same_as_simulator",
)  # fmt: skip
PLAIN = "in serve_plain"  # in a traceback: vLLM failed without headgate
KEPT = (".py", ".json", ".txt", ".jinja")
SCHED = "vllm/v1/core/sched"
NAMES_ONLY = ("Scheduler", "AsyncScheduler")  # a method that comes or goes; their bodies are listed singly
# What our code calls, overrides, or must know the habits of, and what the worker of our tests imitates; a
# class stands for its fields and methods.
TOUCHED = {
    f"{SCHED}/scheduler.py": [
        "Scheduler",
        *(
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
        ),
    ],
    f"{SCHED}/async_scheduler.py": [
        "AsyncScheduler",
        *(
            f"AsyncScheduler.{name}"
            for name in ("__init__", "_update_after_schedule", "_update_request_with_output")
        ),
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
    "vllm/v1/engine/__init__.py": ["EngineCoreOutput", "EngineCoreOutputs", "FinishReason"],
    "vllm/v1/engine/core.py": [f"EngineCore.{name}" for name in ("step", "step_with_batch_queue")],
    "vllm/v1/worker/gpu_model_runner.py": ["GPUModelRunner._update_states"],
    "vllm/v1/worker/gpu/model_runner.py": [
        f"GPUModelRunner.{name}" for name in ("finish_requests", "add_requests", "update_requests")
    ],
}


class Symbol(NamedTuple):
    """One function or class of vLLM."""

    signature: str  # its arguments; of a class its fields and methods
    body: str  # a hash of the code without comments and docstrings
    text: str = ""  # its source; never recorded
    place: str = ""  # file and line


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
        if not (folder / number).is_dir():
            unpack(wheel, Path(scratch, "sources"), number).rename(folder / number)  # all of it, or none
        return number, folder / number


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
                body = "" if name in NAMES_ONLY else _body(member)
                found[name] = Symbol(_signature(member), body, source, f"{file}:{member.lineno}")
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
            extent = "" if name in NAMES_ONLY else _extent(before.text, after.text)
            lines.append(f"{name}: {_words(before.signature, after.signature)}{extent}")
        elif before.body != after.body:
            lines.append(f"{name}: another body{_extent(before.text, after.text)}")
    return lines


def _extent(before: str, after: str) -> str:
    """How much of it, where both sources are at hand."""
    if not before:
        return ""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    return ", " + ", ".join(f"{sign}{sum(line[0] == sign for line in lines)}" for sign in "+-") + " lines"


def _words(old: str, new: str) -> str:
    """Which arguments or fields came and went."""
    before, after = old.split(", "), new.split(", ")
    came = [word for word in after if word not in before]
    went = [word for word in before if word not in after]
    said = [f"with {', '.join(came)}"] * bool(came) + [f"without {', '.join(went)}"] * bool(went)
    return "; ".join(said) or "another order"


def differences(old: dict[str, Symbol], new: dict[str, Symbol]) -> str:
    """Unified differences of all that changed, with what came and what went; comments alone are no change."""
    text = ""
    nothing = Symbol("", "", place="nowhere")
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, nothing), new.get(name, nothing)
        if name not in NAMES_ONLY and before[:2] != after[:2]:
            sides = before.text.splitlines(), after.text.splitlines()
            places = f"{before.place} {name}", f"{after.place} {name}"
            text += "\n".join(difflib.unified_diff(*sides, *places, lineterm="")) + "\n"
    return text


# -- what runs --------------------------------------------------------------------------------------


def _environment(sources: Path) -> dict[str, str]:
    places = [str(sources), str(ROOT / "src"), str(ROOT / "papers")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(places)}


def seams_of(sources: Path) -> list[str]:
    """What headgate relies on and this release lacks; what keeps it from being imported here, such as a
    newer torch that it wants.
    """
    code = "import json; from headgate.live.vllm.seams import faults; print(json.dumps(faults()))"
    command, environment = [sys.executable, "-c", code], _environment(sources)
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        return [f"cannot be imported: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"]
    lacking: list[str] = json.loads(done.stdout.strip().splitlines()[-1])
    return lacking


def run_suites(sources: Path, suites: tuple[str, ...]) -> dict[str, Any]:
    """Tests that passed, and how often which failed, by suite."""
    results: dict[str, Any] = {}
    environment = _environment(sources)
    for suite in suites:
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch, "report.xml")
            command = [sys.executable, "-m", "pytest", "-p", "no:xdist", f"--junitxml={report}"]
            subprocess.run([*command, f"tests/engine/{suite}.py"], cwd=ROOT, env=environment, check=False)
            results[suite] = read_report(report)
    return results


def read_report(report: Path) -> dict[str, Any]:
    """Counts of one suite; one that could not be collected has failed. A test that failed where plain vLLM
    ran its traffic is counted apart.
    """
    if not report.is_file():
        return {"passed": 0, "failed": {"did not run": 1}}
    passed, failed, plain = 0, Counter[str](), Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        outcomes = {child.tag: child.text or "" for child in case}
        wrong = outcomes.keys() & {"failure", "error"}
        if wrong:
            # Of several failures in one, not all need be vLLM's.
            alone = all(PLAIN in outcomes[tag] and "Exception Group" not in outcomes[tag] for tag in wrong)
            (plain if alone else failed)[name] += 1
        elif "skipped" not in outcomes:
            passed += 1
    counts = {"passed": passed, "failed": dict(sorted(failed.items()))}
    return counts | ({"plain": dict(sorted(plain.items()))} if plain else {})


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
    heads = ["vLLM", *(suite.removeprefix("test_").replace("_", " ") for suite in SUITES)]
    heads += ["failed", "failed in plain vLLM"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for version in sorted(record, key=release_numbers, reverse=True):
        suites = record[version]["suites"]
        cells = [str(suites[suite]["passed"]) if suite in suites else "not run" for suite in SUITES]
        cells += [_failures(suites, "failed", "`"), _failures(suites, "plain", "`")]
        lines.append(f"| {' | '.join([version, *cells])} |")
    return "\n".join(lines) + "\n"


def _failures(results: dict[str, Any], of: str, quote: str = "") -> str:
    """Tests with how often they failed, all suites together."""
    counts = Counter[str]()
    for result in results.values():
        counts.update(result.get(of, {}))
    return ", ".join(f"{quote}{name}{quote} ({count})" for name, count in counts.items()) or "none"


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
    """All of it, for one release; 1 where headgate failed."""
    record = read_record()
    version, sources = fetch(words.version, folder)
    lacking = seams_of(sources)
    print(f"vLLM {version}: {'; '.join(lacking) if lacking else 'all that headgate relies on is there'}")
    new, last = symbols(sources), last_before(record, version)
    if last:
        old = {name: Symbol(*pair) for name, pair in record[last]["symbols"].items()}
        if words.diff:
            old = symbols(fetch(last, folder)[1])
        changed = changes(old, new)
        print(f"{len(changed)} of the {len(old.keys() | new.keys())} symbols we touch changed since {last}")
        print("".join(f"  {line}\n" for line in changed), end="")
        print(differences(old, new) if words.diff else "", end="")
    sys.stdout.flush()
    results = run_suites(sources, tuple(filter(None, words.suites.split(","))))
    for suite, result in results.items():
        only = {suite: result}
        print(
            f"{suite}: {result['passed']} passed, failed: {_failures(only, 'failed')}, "
            f"failed in plain vLLM: {_failures(only, 'plain')}"
        )
    if words.record:
        kept = {name: [symbol.signature, symbol.body] for name, symbol in new.items()}
        record = read_record()  # another run may have written meanwhile
        suites = record.get(version, {}).get("suites", {}) | results
        write(record | {version: {"symbols": kept, "suites": suites}})
    failed = bool(lacking) or any(result["failed"] for result in results.values())
    print(advice(version, failed, complete=results.keys() >= {*SUITES}))
    return int(failed)


def advice(version: str, failed: bool, complete: bool) -> str:
    """What the maintainer does next."""
    known = release_numbers(version)[:2] <= NEWEST
    if failed:
        return f"vLLM {version} does not pass; see what changed: --diff"
    if not complete:
        return f"vLLM {version}: not every suite ran"
    if known:
        return f"vLLM {version} passes"
    return f"vLLM {version} passes: set NEWEST in live/vllm/seams.py to it and run this again with --record"


if __name__ == "__main__":
    sys.exit(main())
