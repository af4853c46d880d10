"""The check of the wheel notices a file that is missing and a version that differs."""

import io
import tarfile
from zipfile import ZipFile

import pytest

from headgate import __version__
from tools.check_wheel import (
    PACKAGE,
    ROOT,
    cited_version,
    disagreement,
    missing_in_sdist,
    missing_in_wheel,
    version_of,
    wanted,
    wrong_metadata,
    wrong_project,
)


@pytest.fixture
def wheel(tmp_path):
    """A wheel without the style sheet of reports."""
    path = tmp_path / "headgate-9.9.9-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        for name in wanted(PACKAGE) - {"headgate/report/html/style.css"}:
            archive.writestr(name, "")
        archive.writestr("headgate-9.9.9.dist-info/METADATA", "Metadata-Version: 2.1\nVersion: 9.9.9\n")
    return path


def test_data_files_and_code_are_wanted():
    names = wanted(PACKAGE)
    assert {
        "headgate/py.typed",
        "headgate/core/version.py",
        "headgate/cards/linear-h200-qwen3-8b.json",
    } <= names
    assert any(name.startswith("headgate/data/") for name in names)
    assert any(name.endswith(".js") for name in names)
    assert not any(name.endswith(".pyc") for name in names)


def test_a_missing_file_is_named(wheel):
    assert missing_in_wheel(wheel, PACKAGE) == ["headgate/report/html/style.css"]


def test_a_page_missing_in_the_source_archive_is_named(tmp_path):
    path = tmp_path / "headgate-9.9.9.tar.gz"
    names = {f"src/{name}" for name in wanted(PACKAGE)} | {"LICENSE", "README.md", "CHANGELOG.md"}
    names |= {"CITATION.cff", "pyproject.toml"}
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"headgate-9.9.9/{name}"), io.BytesIO())
    assert missing_in_sdist(path, PACKAGE) == ["SECURITY.md"]


def test_versions_that_differ_are_named(wheel):
    assert disagreement({"a": "1", "b": "1"}) == []
    (line,) = disagreement({"the wheel": version_of(wheel), "CITATION.cff": "1.0"})
    assert line == "versions differ: the wheel says 9.9.9, CITATION.cff says 1.0"


def test_metadata_that_an_index_refuses_are_named():
    good = "Metadata-Version: 2.4\nName: headgate\nVersion: 0.1.0\nLicense-Expression: Apache-2.0\n"
    assert wrong_metadata(good.encode()) == []
    (line,) = wrong_metadata(good.replace("0.1.0", "0.1.x").encode())
    assert "0.1.x" in line and "version" in line


def test_the_project_is_described_by_the_rules():
    text = (ROOT / "pyproject.toml").read_text()
    assert wrong_project(text) == []
    (line,) = wrong_project(text.replace("Development Status :: 3 - Alpha", "Development Status :: 3 - Alfa"))
    assert "classifiers" in line
    (line,) = wrong_project(text.replace("[project.scripts]", "[project.script]"))
    assert "script" in line


def test_the_citation_has_the_version_of_the_package():
    assert cited_version(ROOT / "CITATION.cff") == __version__
