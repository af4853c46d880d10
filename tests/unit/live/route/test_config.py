from pathlib import Path

import pytest

from headgate.core.errors import InputError
from headgate.live.route.config import Config, Discovery, address, changes, checked, read_config
from headgate.live.route.engines import from_file

A, B, C = ({"url": f"http://{name}:8000"} for name in "abc")

WRONG = {
    "unknown table": ({"frnt": {}}, "did you mean 'front'"),
    "unknown field": ({"front": {"prot": 1}}, "did you mean 'port'"),
    "unknown engine field": ({"engines": [{"url": "http://a:1", "slot": 3}]}, "did you mean 'slots'"),
    "no engines": ({"engines": []}, "no engines"),
    "twice": ({"engines": [A, A]}, "twice"),
    "port as text": ({"front": {"port": "80"}}, "front.port"),
    "url with key": ({"engines": [{"url": "http://me:secret@a:1"}]}, "no user"),
    "url scheme": ({"engines": [{"url": "file:///etc/passwd"}]}, "not a URL"),
    "url with newline": ({"engines": [{"url": "http://a:1/x\r\nHost: b"}]}, "ASCII"),
    "class name": ({"classes": [{"name": 'a"b\n'}]}, "not a name"),
    "two classes": ({"classes": [{"name": "a"}, {"name": "a"}]}, "twice"),
    "open to others": ({"front": {"host": "0.0.0.0"}}, "no keys"),
    "one half of tls": ({"front": {"tls_cert": "x"}}, "go together"),
    "tries": ({"limits": {"tries": 0}}, "limits.tries"),
    "size": ({"front": {"body_limit": "3 parsecs"}}, "not a size"),
    "duration": ({"limits": {"idle": "fast"}}, "not a duration"),
    "too many classes": ({"classes": [{"name": f"c{n}"} for n in range(64)]}, "64 classes"),
    "url with the path of a call": ({"engines": [{"url": "http://a:1/v1/"}]}, "ends in /v1"),
    "client_ca alone": ({"front": {"host": "0.0.0.0", "client_ca": "x"}}, "client_ca needs TLS"),
    "one address for both": ({"front": {"port": 9300}}, "the address of the clients"),
    "no prompt fits": ({"classes": [{"name": "a", "match": {"prompt": [9, 9]}}]}, "no prompt has [9, 9]"),
    "connector": ({"kv": {"connector": "mooncake"}}, "nixl"),
}


@pytest.mark.parametrize(("given", "said"), WRONG.values(), ids=WRONG)
def test_mistakes_are_one_line(given: dict, said: str) -> None:
    with pytest.raises(InputError) as caught:
        checked({"engines": [A], **given})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_discovery_file_may_give_slots(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    file.write_text('[[engines]]\nurl = "http://a:8000"\nslots = 3\n[[engines]]\nurl = "http://b:8000"\n')
    found = from_file(Discovery(file=str(file), slots=7))
    assert [engine.slots for engine in found] == [3, 7]


def test_units() -> None:
    config = checked(
        {
            "engines": [A],
            "front": {"body_limit": "1MiB"},
            "limits": {"idle": "500ms", "queue_ttl": 3},
            "kv": {"lease": "1min"},
        }
    )
    assert config.front.body_limit == 1 << 20
    assert (config.limits.idle, config.limits.queue_ttl, config.kv.lease) == (0.5, 3.0, 60.0)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[limits]\nidle = 60\n", "limits.idle: '60' has no unit; write 60ms or 60s"),
        ("[kv]\nlease = 0.5\n", "kv.lease: '0.5' has no unit; write 0.5ms or 0.5s"),
        ('[router]\nreplan = "10"\n', "router.replan: '10' has no unit; write 10ms or 10s"),
    ],
)
def test_a_duration_in_a_file_needs_a_unit(tmp_path: Path, table: str, said: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[[engines]]\nurl = "http://a:1/"\n' + table)
    with pytest.raises(InputError) as caught:
        read_config(file, {}, [])
    assert str(caught.value) == f"{file}: {said}"


def test_no_time_needs_no_unit(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[[engines]]\nurl = "http://a:1/"\n[front]\ndrain_delay = 0\ndrain_timeout = "2min"\n')
    front = read_config(file, {}, []).front
    assert (front.drain_delay, front.drain_timeout) == (0.0, 120.0)


@pytest.mark.parametrize("tables", ["engines", "classes"])
def test_what_should_be_a_list_of_tables_is_named(tmp_path: Path, tables: str) -> None:
    (tmp_path / "fleet.toml").write_text(f"{tables} = 3\n")
    with pytest.raises(InputError, match=rf"write \[\[{tables}\]\]"):
        read_config(tmp_path / "fleet.toml", {}, [])


def test_doubts() -> None:
    config = checked(
        {
            "engines": [A],
            "front": {"admin": "0.0.0.0:9300"},
            "classes": [{"name": "chat", "match": {"key": ["web", "wbe"]}}],
        }
    )
    admin, key = config.doubts({"web"})
    assert "0.0.0.0:9300 asks for no key" in admin
    assert key == "class chat wants key 'wbe', which is not in the key file"
    assert checked({"engines": [A]}).doubts(()) == []


def test_flags_over_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        '[front]\nport = 1234\n[router]\nname = "density-deep"\n[[engines]]\nurl = "http://a:1/"\nslots = 8\n'
    )
    config = read_config(file, {"router": {"name": "least-loaded"}}, [{"url": "http://b:2"}])
    assert config.front.port == 1234
    assert config.router.name == "least-loaded"
    assert [each.url for each in config.engines] == ["http://a:1", "http://b:2"]
    file.write_text("[front\n")
    with pytest.raises(InputError, match="not valid TOML"):
        read_config(file, {}, [])
    with pytest.raises(InputError, match="readable"):
        read_config(tmp_path / "none.toml", {}, [])


def test_addresses() -> None:
    assert address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert address("[::1]:80") == ("::1", 80)
    assert address(":80") == ("127.0.0.1", 80)
    with pytest.raises(ValueError, match="not an address"):
        address("localhost")


def of(**given: object) -> Config:
    return checked({"engines": [A, B], **given})


def test_reload_matches_engines_by_url() -> None:
    found = changes(of(), of(engines=[{**B, "slots": 3}, C]))
    assert found == [
        "engine http://c:8000 is added with 256 slots",
        "engine http://a:8000 is drained and retired",
        "engine http://b:8000 has new settings",
    ]
    assert changes(of(), of()) == ["nothing changes"]
    assert changes(of(), of(limits={"tries": 2})) == ["[limits] has new settings"]


def test_reload_refuses_what_cannot_change() -> None:
    with pytest.raises(InputError, match=r"front\.port"):
        changes(of(), of(front={"port": 1}))
    with pytest.raises(InputError, match="class 'gold'"):
        changes(of(classes=[{"name": "gold"}]), of())
