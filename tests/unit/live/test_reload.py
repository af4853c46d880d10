"""The settings file is read again when it changes, beside the engine, and only when it says something new."""

from __future__ import annotations

import json
import logging
import os
import threading

from headgate.live.engine.policy import build_policy
from headgate.live.engine.reload import Reload, Renewals
from headgate.live.engine.settings import Settings, read_settings
from headgate.live.vllm import VLLM

ENGINE = {"kv_tokens": 100_000, "block": 16, "max_model_len": 8192, "batch_tokens": 4096, "running": 64}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def changed(reload, clock, looks):
    """What the next looks, a second apart, find."""
    found = []
    for _ in range(looks):
        clock.now += 1.0
        found.append(reload.changed())
    return found


def test_a_changed_file_is_read_once_when_it_has_come_to_rest(tmp_path):
    path = tmp_path / "headgate.json"
    path.write_text('{"policy": "mixed"}')
    clock = Clock()
    reload = Reload(str(path), read_settings, clock=clock)
    assert changed(reload, clock, 2) == [None, None]
    path.write_text('{"policy": "v0"}')
    clock.now += 0.5
    assert reload.changed() is None  # not looked at yet
    first, second, third = changed(reload, clock, 3)
    assert first is None and second.policy == "v0" and third is None


def test_words_over_the_file_stay_over_it(tmp_path):
    path = tmp_path / "headgate.json"
    path.write_text("{}")
    clock = Clock()
    reload = Reload(str(path), lambda file: read_settings(file, {"watchdog": "5s"}, "--words"), clock)
    path.write_text('{"policy": "v0", "watchdog": "50s"}')
    assert changed(reload, clock, 2)[1].watchdog == 5


def test_a_file_that_goes_wrong_or_away_is_told_once_and_changes_nothing(tmp_path, caplog):
    path = tmp_path / "headgate.json"
    path.write_text("{}")
    clock = Clock()
    reload = Reload(str(path), read_settings, clock=clock)
    path.write_text('{"polcy": "v0"}')
    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        assert changed(reload, clock, 4) == [None] * 4
        assert "unknown field 'polcy'" in caplog.text and caplog.text.count("stay") == 1
        os.remove(path)
        assert changed(reload, clock, 4) == [None] * 4
        assert caplog.text.count("stay") == 2
    path.write_text(json.dumps({"policy": "v0"}))
    assert changed(reload, clock, 2)[1].policy == "v0"


class Watched:
    """Renewals over a file, looked at by hand."""

    def __init__(self, path) -> None:
        self.clock, self.fallen, self.made = Clock(), False, 0
        self.renewals = Renewals(
            Reload(str(path), read_settings, clock=self.clock),
            read_settings(str(path)),
            self.make,
            lambda: self.fallen,
            background=False,
        )

    def make(self, settings):
        self.made += 1
        return build_policy(settings, VLLM, **ENGINE)

    def taken(self):
        """What the engine gets after three looks."""
        for _ in range(3):
            self.clock.now += 1.0
            self.renewals.look()
        return self.renewals.take()


def test_an_unchanged_file_that_is_rewritten_changes_nothing(tmp_path):
    """Row 10 of the attack: it would make the policy forget what it learned, and the watchdog wait anew."""
    path = tmp_path / "headgate.json"
    path.write_text('{"policy": "mixed"}')
    watched = Watched(path)
    for text in ('{"policy": "mixed"}', '{"policy":   "mixed"}\n', '{"policy": "mixed", "metrics": true}'):
        path.write_text(text)
        assert watched.taken() is None and watched.made == 0
    path.write_text('{"policy": "v0"}')
    assert watched.taken().settings.policy == "v0" and watched.renewals.take() is None
    watched.fallen = True
    path.write_text('{"policy": "v0"} ')
    assert watched.taken().settings.policy == "v0"  # this is how a policy that failed is brought back


def test_another_card_or_policy_file_of_the_same_name_is_a_change(tmp_path):
    mine, path = tmp_path / "mine.py", tmp_path / "headgate.json"
    mine.write_text(
        "from headgate import BatchPolicy, Plan\n"
        "class A(BatchPolicy):\n"
        "    def plan(self, view): return Plan()\n"
    )
    path.write_text(json.dumps({"policy": f"{mine}:A"}))
    watched = Watched(path)
    mine.write_text(mine.read_text() + "# another\n")
    path.write_text(path.read_text())
    assert watched.taken() is not None


def test_a_wrong_file_between_two_equal_ones_changes_nothing(tmp_path, caplog):
    path = tmp_path / "headgate.json"
    path.write_text('{"policy": "mixed"}')
    watched = Watched(path)
    path.write_text('{"policy": "mixed:slots=1000"}')
    assert watched.taken() is None and "the settings in force stay" in caplog.text
    path.write_text('{"policy": "mixed"}')
    assert watched.taken() is None


def test_two_servers_on_one_file(tmp_path):
    """Each takes every change once, whoever looks first."""
    path = tmp_path / "headgate.json"
    path.write_text('{"policy": "mixed"}')
    servers = Watched(path), Watched(path)
    for policy in ("v0", "mixed", "sarathi"):
        path.write_text(json.dumps({"policy": policy}))
        taken = [server.taken() for server in servers]
        assert [each.settings.policy for each in taken] == [policy, policy]
        assert taken[0].policy is not taken[1].policy
        assert [server.renewals.take() for server in servers] == [None, None]


def test_the_engine_never_waits_for_the_file(tmp_path):
    """A file system that hangs holds up only the thread that reads."""
    path = tmp_path / "headgate.json"
    path.write_text('{"policy": "mixed"}')
    reached, free = threading.Event(), threading.Event()

    class Hangs:
        path = "settings"

        def changed(self):
            reached.set()
            assert free.wait(600)
            return Settings(policy="v0")

    renewals = Renewals(Hangs(), Settings(policy="mixed"), lambda new: (None, {}), lambda: False)
    assert reached.wait(600)
    assert renewals.take() is None  # at once
    free.set()
    renewals.close()
    assert renewals.take().settings.policy == "v0"
