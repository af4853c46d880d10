"""The command: check, keys, mistakes, signals, demo."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from fake_engines import FakeEngine
from headgate.cli import main
from router_world import PATIENCE, run

MAIN = "from headgate.cli import main; main()"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, "route", *words], capture_output=True, text=True, timeout=10 * PATIENCE
    )


def test_check_says_what_would_be_done(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        '[router]\nname = "density-deep"\ncard = "linear-h200-qwen3-8b"\n[[classes]]\nname = "chat"\n'
        '[[engines]]\nurl = "http://a:8000"\nslots = 64\nkv_group = "x"\n'
    )
    done = command("--config", str(file), "--check", "--port", "1234")
    assert done.returncode == 0, done.stderr
    assert "listen on 127.0.0.1:1234" in done.stdout
    assert "router density-deep, card linear-h200-qwen3-8b (Qwen3-8B on" in done.stdout
    assert "64 slots an engine; 1 engine:" in done.stdout
    assert "http://a:8000  64 slots" in done.stdout
    assert "classes: chat, default" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--check"], "no engines; give --engine URL"),
        (["--engine", "ftp://x", "--check"], "is not a URL of an engine"),
        (["--engine", "http://a:1", "--router", "density-deep", "--check"], "give --card NAME"),
        (["--engine", "http://a:1", "--router", "leest-loaded", "--check"], "did you mean 'least-loaded'"),
        (["--engine", "http://a:1", "--host", "0.0.0.0"], "there are no keys"),
        (["--config", "/no/such.toml"], "give a readable file"),
        (["--new-key", "a b"], "is not a name"),
        (["--demo", "--engine", "http://a:1"], "drop --engine"),
        (["--engine", "http://a:1", "--seconds", "3"], "belongs to --demo"),
        (["--engine", "http://a:1", "--key-file", "no.txt", "--check"], "no.txt: No such file or directory;"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["headgate", "route", *words])  # here: a process each takes seconds
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


def test_a_new_key_opens_the_door(tmp_path: Path) -> None:
    done = command("--new-key", "alice")
    key, line = (each.split(":")[1].strip() for each in done.stdout.splitlines())
    assert line.startswith("alice ")
    assert key.startswith("hg-")
    assert key not in line


def test_it_serves_reloads_and_drains(tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "fleet.toml"
        async with FakeEngine() as a, FakeEngine() as b:
            head = '[front]\nport = 0\nadmin = "127.0.0.1:0"\ndrain_delay = 0\n'
            file.write_text(head + f'[[engines]]\nurl = "{a.url}"\n')
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", MAIN, "route", "--config", str(file),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ},
            )  # fmt: skip
            assert child.stdout is not None
            assert child.stderr is not None
            assert b"1 of 1 engines are up" in await child.stdout.readline()
            url = (await child.stdout.readline()).decode().split("listening on ")[1].split(",")[0]
            async with aiohttp.ClientSession() as client:
                async with client.post(
                    url + "/v1/completions", json={"prompt": "x", "stream": True}
                ) as answer:
                    assert b"[DONE]" in await answer.read()
                file.write_text(head + f'[[engines]]\nurl = "{b.url}"\n')
                child.send_signal(signal.SIGHUP)
                while not b.seen:
                    async with client.post(url + "/v1/completions", json={"prompt": "x"}) as answer:
                        assert answer.status in (200, 503)  # the new engine has not been probed yet
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
            assert b"Traceback" not in await child.stderr.read()

    run(work())


def test_the_demo_serves_clients() -> None:
    done = command("--demo", "--seconds", "4")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.split()}
    assert float(lines["chat"][lines["class"].index("served")]) > 0
    assert {"breaker", "state", "KV", "TTFT"} & {*lines["engine"]} and "page" in done.stdout
    assert "Traceback" not in done.stderr


def test_an_unknown_router_is_one_line_when_the_server_starts() -> None:
    done = command("--engine", "http://127.0.0.1:1", "--router", "nope", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("headgate: unknown router 'nope'") and done.stderr.count("\n") == 1
