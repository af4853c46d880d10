"""The driver of a trial on a world of its own: settings read again, marks in a trace, guards, early ends."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headgate.core.errors import InputError, RunError
from headgate.live.trial import load
from headgate.live.trial.arms import Arm, SettingsFile, read_arms
from headgate.live.trial.book import Book
from headgate.live.trial.load import FollowedTrace
from headgate.live.trial.trial import BySettings, NotReadError, Trial, TrialPlan, line
from headgate.stats.switchback import TTFT

SPEED = 100.0  # seconds of the world in one of ours


class World:
    """A server that answers each request after a delay of its policy, and writes what a plug-in writes."""

    def __init__(self, config, trace, delays, fail_at=None, stubborn=False, hangs=("", 1), rest=None):
        self.config, self.trace, self.delays, self.fail_at = config, trace, delays, fail_at
        self.rest = rest or (0.0, 0.0)  # no request comes, so no step reads the settings
        self.stubborn, self.hangs = stubborn, hangs  # policy; one in so many never ends
        self.now, self.read, self.draw = 0.0, "", random.Random(1)
        self.origin = time.perf_counter()

    def settings(self):
        text = self.config.read_text()
        return json.loads(text) if text.startswith("{") else {"policy": "mixed"}

    async def serve(self):
        number, ends, policy = 0, [], "mixed"
        while True:
            await asyncio.sleep(0.5 / SPEED)
            self.now = (time.perf_counter() - self.origin) * SPEED
            if self.rest[0] <= self.now < self.rest[1]:
                continue
            words, lines = self.settings(), []
            if self.config.read_text() != self.read:
                self.read, before = self.config.read_text(), policy
                policy = policy if self.stubborn else words["policy"]
                if policy != before:
                    lines.append({"event": "policy", "at": self.now, "policy": policy, "parameters": {}})
                if "mark" in words:
                    lines.append({"event": "mark", "at": self.now, "date": 1e9, "mark": words["mark"]})
                self.trace = words.get("trace", self.trace)
            if self.fail_at is not None and self.now > self.fail_at:
                lines.append({"event": "fell_back", "at": self.now, "reason": "it raised"})
            known = {"id": number, "prompt": 5, "limit": 9, "kind": "", "guess": None, "priority": 0}
            lines.append(
                {"event": "arrived", **known, "at": self.now, "first_token": 0.5, "between_tokens": None}
            )
            delay = self.delays[policy] * self.draw.uniform(0.5, 1.5)
            if policy != self.hangs[0] or number % self.hangs[1]:
                ends.append((self.now + delay, number))
            number += 1
            for end, id in [each for each in ends if each[0] <= self.now + 0.5]:
                ends.remove((end, id))
                after = {"how": "stopped", "output": 1, "evictions": 0, "wasted": 0, "cached": 0}
                lines += [
                    {"event": "prefilled", "id": id, "at": end},
                    {"event": "finished", "id": id, "at": end, **after},
                ]
            if self.trace:
                with open(self.trace, "a") as file:
                    file.write("".join(json.dumps(each) + "\n" for each in lines))


def run(
    tmp_path,
    delays,
    arms=("fast=mixed", "slow=v0"),
    own=False,
    fail_at=None,
    stubborn=False,
    hangs=("", 1),
    edit="",
    damage=False,
    rest=None,
    **words,
):
    config, trace = tmp_path / "s.toml", tmp_path / "t.jsonl"
    config.write_text('policy = "mixed"\n')
    if not own:
        trace.write_text('{"trace": 1}\n')
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if edit and line.startswith("round 3 "):
            config.write_text(edit)
        if damage and line.startswith("round 3 "):
            with trace.open("a") as file:
                file.write("no JSON\n")

    async def both():
        chosen = read_arms(list(arms), str(config), {})
        if own:
            chosen = tuple(replace(arm, words={**arm.words, "trace": str(trace)}) for arm in chosen)
        plan = TrialPlan(chosen, **{"minutes": 6.0, "block": 30.0, "sizing": 20.0, "speed": SPEED, **words})
        source = FollowedTrace(str(trace), own)
        file = SettingsFile(str(config))
        file.take()
        world = asyncio.create_task(
            World(config, None if own else trace, delays, fail_at, stubborn, hangs, rest).serve()
        )
        try:
            return await Trial(plan, source, BySettings(file, source, None, SPEED), say).run()
        finally:
            world.cancel()

    outcome = asyncio.run(both())
    assert config.read_text() == (edit or 'policy = "mixed"\n')
    return outcome, said


def test_a_difference_in_your_own_traffic_is_found(tmp_path):
    outcome, said = run(tmp_path, {"mixed": 0.1, "v0": 0.5})
    findings = outcome.findings
    verdict = findings.found[0].verdict(findings.primary)
    assert findings.primary.name == "kept" and verdict.word == "less" and verdict.change.baseline == 1.0
    assert findings.rounds >= 6 and not outcome.guarded and not outcome.interrupted
    assert "rounds of 2 blocks of 30 s" in said[0] and said[-1].startswith("round 6 of 6; light; slow: ")
    assert "promises kept 100.0 % -> " in said[-1] and "cannot tell" not in said[-1]  # the answer follows
    assert said[1].startswith("round 1 of 6, 5 min left; ")


def test_a_trace_that_the_server_writes_for_the_trial(tmp_path):
    outcome, _ = run(tmp_path, {"mixed": 0.1, "v0": 0.5}, own=True)
    assert outcome.findings.rounds == 6
    assert outcome.findings.found[0].verdict(outcome.findings.primary).word == "less"
    assert all(not block.unfinished for block in outcome.book.blocks)


def test_it_ends_early_when_it_is_clear_and_not_with_whole(tmp_path):
    clear, _ = run(tmp_path, {"mixed": 0.1, "v0": 1.0}, minutes=15.0, primary=TTFT)
    assert clear.findings.rounds < 12 and clear.stopped == "the answer was clear before the planned end"
    (tmp_path / "t.jsonl").unlink()
    whole, _ = run(tmp_path, {"mixed": 0.1, "v0": 1.0}, minutes=7.0, primary=TTFT, whole=True)
    assert whole.findings.rounds == 7 and not whole.stopped


def test_the_guard_ends_it(tmp_path):
    fallen, _ = run(tmp_path, {"mixed": 0.1, "v0": 0.5}, fail_at=200.0)
    assert fallen.guarded and "the policy fell back: it raised; the server is back" in fallen.stopped
    (tmp_path / "t.jsonl").unlink()
    floor, _ = run(tmp_path, {"mixed": 0.1, "v0": 2.0}, floor=0.9)
    assert floor.guarded and "slow kept at most 0% of the promises in two blocks running" in floor.stopped
    (tmp_path / "t.jsonl").unlink()
    backlog, _ = run(tmp_path, {"mixed": 0.1, "v0": 200.0})
    assert backlog.guarded and "the backlog grew beyond 30 s of work" in backlog.stopped


def test_an_edit_of_the_file_ends_it_and_stays(tmp_path):
    outcome, _ = run(tmp_path, {"mixed": 0.1, "v0": 0.5}, edit='policy = "v0"\n')
    assert outcome.guarded and outcome.findings.rounds in (2, 3)
    assert outcome.stopped.endswith(
        "s.toml was changed by another; the settings file is left as it was edited"
    )


def test_a_bad_line_of_the_trace_leaves_what_was_found(tmp_path):
    outcome, _ = run(tmp_path, {"mixed": 0.1, "v0": 0.5}, damage=True)
    assert outcome.guarded and outcome.findings.rounds in (2, 3)
    assert (
        "t.jsonl: not a JSON object; give the trace of one running server; the server is" in outcome.stopped
    )


def test_traffic_that_rests_costs_its_rounds_only(tmp_path, monkeypatch):
    monkeypatch.setattr("headgate.live.trial.trial.READ_WITHIN", 0.3)  # of ours: 30 of the world
    for _ in range(3):  # a busy machine may sleep through the rest
        outcome, said = run(tmp_path, {"mixed": 0.1, "v0": 0.5}, minutes=8.0, whole=True, rest=(130.0, 200.0))
        if outcome.findings.rounds < 8:
            break
    assert outcome.findings.rounds in (6, 7) and not outcome.guarded
    assert any("is left out: no request came at a switch" in each for each in said)
    (tmp_path / "t.jsonl").unlink()
    dead, _ = run(tmp_path, {"mixed": 0.1, "v0": 0.5}, minutes=8.0, rest=(130.0, 1e9))
    assert (
        dead.guarded
        and "shows no new settings after 0.3 s" in dead.stopped
        and "--rate 20" in dead.stopped
        and dead.findings.rounds >= 1
    )


def test_an_arm_under_which_a_request_hangs_is_guarded(tmp_path):
    floor, _ = run(tmp_path, {"mixed": 0.1, "v0": 2.0}, floor=0.9, hangs=("v0", 20))
    assert floor.guarded and "slow kept at most 0% of the promises in two blocks running" in floor.stopped


def test_requests_that_hang_hide_no_figures(tmp_path):
    outcome, said = run(tmp_path, {"mixed": 0.1, "v0": 0.5}, hangs=("mixed", 50))
    assert outcome.findings.rounds == 6 and not outcome.stopped
    assert any("round 4 of 6, 2 min left; light" in each for each in said), said  # not only at the end


def test_a_server_whose_own_flags_win_is_noticed(tmp_path):
    outcome, _ = run(tmp_path, {"mixed": 0.1, "v0": 0.5}, stubborn=True)
    assert outcome.guarded and "did not take the settings over" in outcome.stopped
    assert outcome.findings.rounds == 0


def test_too_short_a_plan_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"3 minutes hold 3 rounds of 2 blocks of 30 s.*--minutes 6 or more"):
        run(tmp_path, {"mixed": 0.1, "v0": 0.1}, minutes=3.0)
    assert (tmp_path / "s.toml").read_text() == 'policy = "mixed"\n'


def test_a_line_before_anything_is_known(tmp_path):
    outcome, said = run(tmp_path, {"mixed": 0.1, "v0": 0.1})
    assert any("cannot tell yet: roughly" in each for each in said)
    assert line(outcome.findings, 6, 0).startswith("round 6; light; ")


class Shown:
    """Metrics of a server that takes settings over after so many looks; None: it does not answer again."""

    renewals, fallen = 3.0, 0.0

    def __init__(self, after, book, comes):
        self.after, self.book, self.comes, self.looks = after, book, comes, 0

    async def read(self):
        self.looks += 1
        self.book.came += self.comes
        self.renewals += self.looks == self.after
        return self.looks == 1 or self.after is not None


class TraceLoad:
    """Its clock runs with the looks at it."""

    def __init__(self):
        self.book, self.at = Book(), 100.0

    def now(self):
        self.at += 4.0
        return self.at


@pytest.mark.parametrize(
    ("after", "comes", "error"),
    [(2, True, ""), (None, True, ""), (10**9, True, "less than --speed 100"), (10**9, False, "too slow")],
)
def test_a_block_counts_from_when_its_arm_is_in_force(tmp_path, monkeypatch, after, comes, error):
    """A busy machine takes settings over late."""
    monkeypatch.setattr("headgate.live.trial.trial.READ_WITHIN", 0.1)
    (tmp_path / "s.toml").write_text('policy = "mixed"\n')
    source, slow = TraceLoad(), Arm("slow", {"policy": "v0"})
    shown = Shown(after, source.book, comes)
    switch = BySettings(SettingsFile(str(tmp_path / "s.toml")), source, shown, SPEED)
    blocks = []

    def begin(at):
        source.now()
        blocks.append(source.book.begin(0, 0, at, 5.0))
        return blocks[-1]

    async def put():
        await switch.put(Arm("fast", {"policy": "mixed"}), "start", begin)
        assert blocks[0].measured_from == blocks[0].start + 5.0  # nothing was switched
        return await switch.put(slow, "round 1", begin)

    if error:
        with pytest.raises(RunError, match=error) as raised:
            asyncio.run(put())
        assert isinstance(raised.value, NotReadError) is not comes  # an idle engine reads nothing
    else:
        block = asyncio.run(put())
        assert block.measured_from == source.at > block.start + 5.0


@pytest.mark.parametrize(("late", "notes"), [(0, 0), (2, 1)])
def test_an_emulator_that_cannot_keep_up_is_said(late: int, notes: int) -> None:
    """Of 100 steps during the trial; those before it do not count."""
    name = 'headgate_emulator_late_seconds_bucket{engine="0",le="%s"} %d\n'
    shown = [(100, 100), (200 - late, 200)]

    async def metrics(request: web.Request) -> web.Response:
        in_time, steps = shown.pop(0)
        return web.Response(text="headgate_info 1\n" + name % ("0.005", in_time) + name % ("+Inf", steps))

    async def work() -> list[str]:
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        async with TestServer(app) as server:
            read = load.PlugInMetrics(str(server.make_url("")).rstrip("/"))
            await read.require()
            await read.read()
            return read.notes()

    said = asyncio.run(work())
    assert len(said) == notes
    assert not said or "2 % of the emulator's steps ended more than 5 ms late; free a core" in said[0]


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LONGEST_ANSWER", 1000)

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        with suppress(ConnectionError):
            while True:
                await answer.write(b"a" * 1000)
        return answer

    async def work() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", endless)
        async with TestServer(app) as server:
            with pytest.raises(InputError, match=r"no server answers at .* more than 1,000 bytes; start it"):
                await load.served_model(str(server.make_url("")).rstrip("/"), "")

    asyncio.run(work())


def test_only_a_machine_late_with_half_of_the_requests_is_too_slow():
    sent = object.__new__(load.TraceLoad)
    sent._late, sent._speed, sent.failed, sent._why = [0.0] * 90 + [0.05] * 10, 1.0, 0, ""
    late = "1 % of the requests were sent more than 50 ms late; free a core or lower the load"
    assert not sent.too_slow() and sent.notes() == [late]
    sent._late = [0.05] * 10
    slow = "this machine is too slow: 50 % of the requests were sent more than 50 ms late"
    assert sent.too_slow().startswith(slow) and sent.notes() == [sent.too_slow()]
