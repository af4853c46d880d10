"""`headgate trial` refuses what cannot be compared with one line, before anything is changed."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from headgate.core.request import Slo

pytest.importorskip("aiohttp")
URL = ["--url", "http://127.0.0.1:9"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('policy = "mixed"\nttft = "500ms"\n')
    return str(path)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], "--arm needs --config"),
        (["--arm", "keep"], "--arm needs --config FILE"),
        (["--config", "{c}"], "0 arms; compare 2 to 6"),
        (["--config", "{c}", "--arm", "mixed"], "is what the settings file says already"),
        (
            ["--config", "{c}", "--arm", "eb:refill=8", "--arm", "eb:refill=8"],
            "two arms are called eb:refill=8",
        ),
        (["--config", "{c}", "--arm", "kep"], "arm kep: unknown policy"),
        (["--config", "{c}", "--arm", "autoo"], "arm autoo: unknown policy 'autoo'; did you mean 'auto'?"),
        (["--config", "{c}", "--arm", "zzz"], "slai, v0, vllm, wait"),
        (["--config", "{c}", "--arm", "eb:refil=8"], "arm eb:refil=8:"),
        (["--config", "{c}", "--arm", ""], "is empty; name a policy"),
        (["--config", "{c}", "--arm", "none.toml"], "none.toml: No such file"),
        (["--config", "no.toml", "--arm", "keep"], "no.toml: No such file"),
        (["--config", ".", "--arm", "keep"], "settings file .: "),
        (["--config", "{c}", "--arm", "keep", "--follow", "no.jsonl"], "no trace of a live engine"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5"], "say where, --url"),
        (["--config", "{c}", "--arm", "keep", *URL], "add --rate or --trace, or drop it"),
        (["--config", "{c}", "--arm", "keep", "--prompt", "5"], "--prompt is about requests that the trial"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5", "--url", "here"], "is no URL"),
        (
            ["--config", "{c}", "--arm", "keep", "--rate", "5", *URL],
            "no server answers at http://127.0.0.1:9: Connection refused; start it",
        ),
        (
            ["--config", "{c}", "--arm", "keep", "--arm", "vllm", "--clients", "2", *URL],
            "no server answers at http://127.0.0.1:9",
        ),
        (["--config", "{c}", "--arm", "keep", "--rate", "0", *URL], "rate: 0.0 is not allowed"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5", "--minutes", "-1", *URL], "--minutes -1"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5", "--minutes", "nan", *URL], "--minutes nan"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5", "--minutes", "5", *URL], "give --minutes 6"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5", "--speed", "0", *URL], "--speed 0"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5", "--seed", "-3", *URL], "--seed -3"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5", "--block", "1h", *URL], "--block 1h"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5", "--block", "x", *URL], "x"),
        (
            ["--config", "{c}", "--arm", "keep", "--rate", "5", "--primary", "p", *URL],
            "--primary p is unknown",
        ),
        (["--config", "{c}", "--arm", "keep", "--stop-if", "kept>1"], "write it as 'kept<90%'"),
        (["--config", "{c}", "--arm", "keep", "--trace", "azure", *URL], "unknown trace"),
        (["--config", "{c}", "--arm", "keep", "--rate", "5", "--clients", "4", *URL], "two kinds of load"),
        (["--arm", "a=http://127.0.0.1:9", "--arm", "b=http://127.0.0.1:9/"], "are one server"),
        (["--arm", "a=http://127.0.0.1:9", "--arm", "mixed"], "give URLs or settings"),
        (["--arm", "a=http://127.0.0.1:9", "--arm", "b=http://127.0.0.1:8"], "such as --rate 10"),
        (["--arm", "a=http://127.0.0.1:9", "--arm", "b=http://[", "--rate", "5"], "http://127.0.0.1:9"),
        (["--config", "{c}", "--arm", "keep", "--json", "none/x.json"], "its folder does not exist"),
    ],
)
def test_one_line_and_exit_code_2(refused, config, flags, wanted):
    before = os.stat(config)
    refused(["trial", *(flag.replace("{c}", config) for flag in flags)], wanted)
    after = os.stat(config)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)  # nobody has written it


def test_promises_that_none_made(refused, tmp_path):
    (tmp_path / "bare.toml").write_text('policy = "mixed"\n')
    flags = ["trial", "--config", "bare.toml", "--arm", "keep", "--rate", "5", *URL]
    refused([*flags, "--stop-if", "kept<90%"], "--stop-if is about promises, and none is made")
    refused([*flags, "--primary", "kept"], "--primary kept is about promises")
    refused([*flags, "--stop-if", "kept<90%", "--itl", "50ms"], "no server answers")
    (tmp_path / "bare.toml").write_text('policy = "mixed"\n[classes.batch]\nbackground = true\n')
    refused([*flags, "--primary", "kept"], "--primary kept is about promises")


def test_background_classes_are_promised_nothing(tmp_path):
    from headgate.cli.trial import _judged
    from headgate.live.trial.arms import base_settings

    path = tmp_path / "classes.toml"
    path.write_text('ttft = "1s"\n[classes.batch]\nbackground = true\n[classes.chat]\ntbt = "50ms"\n')
    judged = _judged(base_settings(str(path), {}))
    assert judged["batch"][:2] == (None, None) and judged["chat"][:2] == (1.0, 0.05)


def test_arms_must_promise_the_same(refused, config, tmp_path):
    (tmp_path / "loose.toml").write_text('ttft = "2s"\n')
    refused(["trial", "--config", config, "--arm", "loose.toml", "--rate", "5", *URL], "changes ttft")
    (tmp_path / "traced.toml").write_text('trace = "x.jsonl"\n')
    refused(["trial", "--config", config, "--arm", "traced.toml", "--rate", "5", *URL], "changes trace")


def test_a_file_that_cannot_be_written(refused, config, tmp_path, monkeypatch):
    trace = tmp_path / "t.jsonl"
    trace.write_text(json.dumps({"trace": 1, "policy": "mixed"}) + "\n")

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("headgate.live.trial.arms.SettingsFile._write", refuse)
    refused(
        ["trial", "--config", config, "--arm", "keep", "--follow", trace], "Permission denied", "writable"
    )


@contextmanager
def answering():
    """A socket that answers two calls with the same JSON; and what it was asked."""
    body = b'{"data": [{"id": "m"}]}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    asked.append(connection.recv(65536))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        thread.join(5)


def test_a_server_that_is_no_vllm_or_has_no_plug_in(refused, config):
    with answering() as (url, _):
        refused(
            ["trial", "--config", config, "--arm", "keep", "--rate", "5", "--url", url], "no plug-in reads"
        )


def test_a_server_gets_only_the_key_that_is_meant_for_it(refused, config, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-another")
    with answering() as (url, asked):
        flags = ["trial", "--config", config, "--arm", "keep", "--rate", "5", "--url", url]
        refused(flags, "no plug-in reads")
    assert len(asked) == 2 and not any(b"uthorization" in each for each in asked)
    with answering() as (url, asked):
        refused([*flags[:-1], url, "--api-key", "mine"], "no plug-in reads")
    assert all(b"Authorization: Bearer mine\r\n" in each for each in asked)


def test_the_next_trial_sends_other_prompts():
    from headgate.live.trial.load import TraceLoad
    from headgate.workloads.workload import Workload

    async def prompts():
        load = TraceLoad(Workload.of([40, 40], [1, 1], arrival=[0.0, 1.0]), "http://127.0.0.1:9", {}, 3)
        return [load._prompt(row, turn) for row, turn in ((0, 0), (0, 0), (1, 0), (0, 1))]

    first, second = asyncio.run(prompts()), asyncio.run(prompts())
    assert first[0] == first[1] and len({tuple(each) for each in first + second}) == 6


@pytest.mark.parametrize("unread", [False, True])  # what lies unread makes a close a reset
def test_a_connection_that_the_server_closed_meanwhile_fails_no_request(unread):
    from headgate.live.trial.load import TraceLoad
    from headgate.workloads.workload import Workload

    body = b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    closed = []

    async def serve(reader, writer):
        """Answers the first request of a connection, and closes it when it brings another."""
        for first in (True, False):
            if unread and not first:
                connection = writer.get_extra_info("socket")
                writer.transport.pause_reading()
                while not select.select([connection], [], [], 0)[0]:
                    await asyncio.sleep(0.01)
                closed.append(b"")
                break
            with suppress(asyncio.IncompleteReadError):
                asked = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in asked.split(b"\r\n") if line.startswith(b"Content-Length"))
                await reader.readexactly(int(length.split()[1]))
                if first:
                    writer.write(head + body)
                else:
                    closed.append(asked)
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        work = Workload.of([40, 40, 40], [1, 1, 1], arrival=[0.0, 0.1, 0.2])
        load = TraceLoad(work, f"http://127.0.0.1:{port}", {None: Slo()}, 3)
        await load.start()
        await asyncio.sleep(0.6)
        await load.stop(5.0)
        await asyncio.sleep(0.1)  # its connections end
        server.close()
        return load

    load = asyncio.run(run())
    assert closed and load.book.finished >= 3 and load.failed == 0


def test_nothing_is_left_behind(refused, config):
    refused(["trial", "--config", config, "--arm", "keep", "--rate", "5", *URL], "no server answers")
    assert not os.path.exists("runs")
