from hashlib import sha256
from pathlib import Path

import pytest

from headgate.core.errors import InputError
from headgate.live.route.classes import Classes, Key, new_key, read_keys
from headgate.live.route.config import checked

RULES = [
    {"name": "long", "match": {"prompt": [4096, 1 << 30]}},
    {"name": "tagged", "match": {"field": "batch"}},
    {"name": "coder", "match": {"model": ["qwen-coder", "deepseek"]}},
    {"name": "asked", "match": {"header": "urgent"}},
    {"name": "alice", "match": {"key": "alice"}},
    {"name": "both", "match": {"key": "bob", "model": "m"}},
]
ALICE, BOB = Key("alice", b"", choose=True), Key("bob", b"")


def classes(keyed: bool = True) -> Classes:
    return Classes(checked({"engines": [{"url": "http://a:1"}], "classes": RULES}), keyed)


@pytest.mark.parametrize(
    ("traits", "name"),
    [
        ((ALICE, "urgent", "qwen-coder", "batch", 9999), "alice"),
        ((BOB, "urgent", "m", "batch", 9999), "both"),
        ((BOB, "urgent", "qwen-coder", "batch", 9999), "coder"),  # bob may not choose
        ((Key("carol", b"", True), "urgent", "qwen-coder", None, 0), "asked"),
        ((Key("carol", b"", True), None, "x", "batch", 9999), "tagged"),
        ((BOB, None, "x", "batch", 9999), "long"),  # nor by a field of the body
        ((BOB, None, "x", "nonsense", 9999), "long"),
        ((BOB, None, "x", "nonsense", 4095), "default"),
        ((None, "urgent", "", None, 0), "default"),
    ],
)
def test_first_kind_of_rule_decides(traits: tuple, name: str) -> None:
    assert classes().of(*traits).name == name


def test_the_header_counts_where_there_are_no_keys() -> None:
    assert classes(keyed=False).of(None, "urgent", "", None, 0).name == "asked"
    assert classes(keyed=False).of(None, None, "", "batch", 0).name == "tagged"


def test_a_class_without_rules_takes_nothing() -> None:
    made = Classes(checked({"engines": [{"url": "http://a:1"}], "classes": [{"name": "idle"}]}))
    assert made.of(None, None, "", None, 0).name == "default"
    assert made.names == ("idle", "default")


def test_keys(tmp_path: Path) -> None:
    key, line = new_key("alice")
    file = tmp_path / "keys"
    file.write_text(f"# mine\n{line} choose\nbob {sha256(b'pass').hexdigest()}  # his\n")
    keys = read_keys(file)
    assert keys.required
    found = keys.find(f"Bearer {key}")
    assert found is not None
    assert (found.name, found.choose) == ("alice", True)
    assert keys.find("bearer pass").name == "bob"
    for wrong in (None, "", "pass", "Basic pass", "Bearer", "Bearer wrong", "Bearer " + "x" * 10_000):
        assert keys.find(wrong) is None
    assert key not in file.read_text()
    assert not read_keys(None).required


@pytest.mark.parametrize(
    "text", ["", "alice\n", "alice 12\n", f"alice {'0' * 64} admin\n", f"a/b {'0' * 64}\n"]
)
def test_bad_key_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InputError, match="key file"):
        read_keys(tmp_path / "keys")
