"""The compiled build is optional: marks do nothing, and plain Python can be forced."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
import yaml

from headgate.core.build import build_name, compiled, mypyc_attr
from headgate.core.errors import InputError
from headgate.methods.make import typed
from headgate.pure import SourcesOnly

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
from check_compiled import differences  # noqa: E402


def test_every_compiled_module_exists():
    names = re.findall(r'^    "([a-z_/]+)",$', (ROOT / "setup.py").read_text(), re.M)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / "src" / "headgate" / f"{name}.py").is_file()] == []


def test_compiled_classes_with_plain_subclasses_are_marked():
    """Such a class cannot be made in the compiled build unless the compiler was told."""
    compiled = set(re.findall(r'^    "([a-z_/]+)",$', (ROOT / "setup.py").read_text(), re.M))
    marked, bare, subclassed = set(), set(), set()
    for path in (ROOT / "src" / "headgate").rglob("*.py"):
        own = str(path.relative_to(ROOT / "src" / "headgate").with_suffix("")) in compiled
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and own:
                marks = [ast.unparse(each) for each in node.decorator_list]
                known = any("allow_interpreted" in each or "native_class=False" in each for each in marks)
                (marked if known else bare).add(node.name)
            elif isinstance(node, ast.ClassDef):
                subclassed |= {ast.unparse(base) for base in node.bases}
    assert "Identity" in marked & subclassed
    assert bare & subclassed == set()


def test_parameters_without_annotations_are_read_as_numbers_where_they_look_like_one():
    """As compiled classes have them: no annotation is left."""
    bare = inspect.Parameter("refill", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [typed("policy eb", bare, text) for text in ("24", 24, "0.5", "arrival", "false", True)]
    assert found == [24, 24, 0.5, "arrival", False, True]
    assert [type(each) for each in found] == [int, int, float, str, bool, bool]
    with pytest.raises(InputError, match="refill='nan' is not"):
        typed("policy eb", bare, "nan")


def test_a_mark_changes_nothing():
    assert mypyc_attr(allow_interpreted_subclasses=True)(Path) is Path


def test_sources_are_found_and_compiled_modules_are_not(tmp_path):
    (tmp_path / "both.py").write_text("")
    (tmp_path / "both.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    (tmp_path / "alone.abi3.so").write_bytes(b"")
    spec = SourcesOnly.find_spec("headgate.both", [str(tmp_path)])
    assert spec is not None and spec.origin == str(tmp_path / "both.py")
    assert SourcesOnly.find_spec("headgate.alone", [str(tmp_path)]) is None
    assert SourcesOnly.find_spec("numpy.both", [str(tmp_path)]) is None


@pytest.mark.parametrize(("said", "forced"), [("1", True), ("0", False), ("", False)])
def test_plain_python_is_forced_by_the_environment(said, forced):
    code = "import sys, headgate; print('headgate.pure' in sys.modules)"
    env = os.environ | {"HEADGATE_PURE": said}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(forced)


def test_a_source_tree_runs_plain_python():
    import headgate

    if Path(headgate.__file__).is_relative_to(ROOT / "src"):
        assert not compiled() and build_name() == "pure Python"


def test_differences_are_named():
    assert differences(["compiled", "0 a 1"], ["pure Python", "0 a 1"]) == []
    assert "0 a 2" in differences(["compiled", "0 a 1"], ["pure Python", "0 a 2"])[0]
    assert "builds that ran" in differences(["pure Python"], ["pure Python"])[0]
    assert "runs compiled" in differences(["compiled", "0 a 1"], ["pure Python"])[0]


def test_there_are_compiled_wheels_for_every_python_we_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [line.rpartition(" ")[2] for line in project["project"]["classifiers"] if ":: Python ::" in line]
    wheels = project["tool"]["cibuildwheel"]
    assert wheels["build"] == [f"cp{version.replace('.', '')}-*" for version in named]
    assert wheels["environment"] == {"HEADGATE_COMPILE": "1"}


def test_only_the_job_that_publishes_may_write_and_only_from_a_tag():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    (publish,) = [job for job in workflow["jobs"].values() if "permissions" in job]
    assert publish["permissions"]["id-token"] == "write"
    assert publish["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    assert set(publish["needs"]) == set(workflow["jobs"]) - {"publish"}


# -- what make demo installs


def closure(names):
    """Distributions that pip installs for these, without extras."""
    found, pending = set(), [*names]
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name not in found:
            found.add(name)
            lines = [line for line in distribution(name).requires or () if ";" not in line]
            pending += [re.match(r"[\w.-]+", line)[0] for line in lines]
    return found


# A demo on fewer requests where nothing but these modules of other packages can be imported.
SMALL_DEMO = """
import sys
class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in {missing!r}:
            raise ModuleNotFoundError(f"make demo does not install {{name}}", name=name)
sys.meta_path.insert(0, Missing)
from headgate.cli import demo, main
demo.STAIR, demo.FULL["requests"] = 21.0, 700
sys.argv = ["headgate", "demo"]
main()
"""


def test_the_demo_runs_with_at_most_twenty_packages(tmp_path):
    needs = re.search(r"^DEMO_NEEDS := (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    there = closure(needs)
    assert len(there | {"headgate", "pip", "setuptools"}) <= 20
    modules = packages_distributions().items()
    missing = {
        module
        for module, owners in modules
        if "headgate" not in owners and not there & {re.sub(r"[-_.]+", "-", one).lower() for one in owners}
    }
    assert "aiohttp" in missing
    code = SMALL_DEMO.format(missing=missing)
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and "report: " in ran.stdout, ran.stdout + ran.stderr
