"""What the router writes down comes back: as a run, and as a workload for the simulator."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_engines import Call, stream
from headgate.cli import app
from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.record.live_trace import is_route_trace, read_route_trace
from headgate.record.tables import ENDS, Run
from headgate.stats.metrics import summarise
from headgate.workloads.traces import read_trace
from router_world import routed, run


def written(file: Path, requests: int = 30) -> None:
    async def slow(call: Call) -> None:
        if "slow" in call.seen.json["prompt"]:
            await asyncio.sleep(0.05)
        await stream(call)

    async def work() -> None:
        classes = [{"name": "long", "match": {"prompt": [100, 1 << 30]}}]
        async with routed(slow, front={"trace": str(file)}, classes=classes) as world:
            prompts = ["slow", "x" * 4000, "quick"] * (requests // 3)
            await asyncio.gather(*(world.stream(prompt=prompt) for prompt in prompts))
            await world.ask(raw=b"{")  # never became a request

    run(work())


def test_a_router_s_trace_is_a_run_and_a_workload(tmp_path: Path) -> None:
    file = tmp_path / "router.jsonl"
    written(file)
    assert is_route_trace(file)
    found = read_route_trace(file)
    assert len(found.requests["id"]) == 30
    assert found.completed().all()
    assert [kind["name"] for kind in found.kinds] == ["default", "long"]
    assert set(found.requests["output"].tolist()) == {3}
    figures = summarise(found)
    assert figures.ttft.mean.value > 0
    workload, bad = read_trace(file)
    assert bad.count == 0
    assert len(workload) == 30
    assert [kind.name for kind in workload.kinds] == ["long", "default"]
    assert (workload.arrival[1:] >= workload.arrival[:-1]).all()


def test_a_router_that_is_started_again_goes_on_with_its_trace(tmp_path: Path) -> None:
    """Arrivals of the second life come after those of the first, not on top of them."""
    file = tmp_path / "router.jsonl"
    written(file, 6)
    ended = max(json.loads(line)["finished"] for line in file.read_text().splitlines())
    written(file, 6)
    found = read_route_trace(file).requests["arrival"]
    again = [json.loads(line)["arrival"] for line in file.read_text().splitlines()[6:]]
    assert min(again) > ended
    assert found[0] == 0 and (found[5] < found[6:]).all()
    assert read_trace(file)[0].arrival.tolist() == pytest.approx(found.tolist(), abs=1e-5)


def test_an_estimated_output_is_no_longer_than_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "router.jsonl"

    async def chatty(call: Call) -> None:
        await call.head()
        for number in range(5):  # no usage; the first event of a chat has no token
            await call.token(f"t{number}")
        await call.done()

    async def work() -> None:
        async with routed(chatty, front={"trace": str(file)}) as world:
            await world.stream(max_tokens=4)
            await world.stream(max_tokens=4, n=2)
            await world.stream()

    run(work())
    assert [json.loads(line)["output"] for line in file.read_text().splitlines()] == [4, 5, 5]


def test_refused_and_broken_requests_are_in_it(tmp_path: Path) -> None:
    file = tmp_path / "router.jsonl"

    async def resets(call: Call) -> None:
        call.reset()

    async def work() -> None:
        async with routed(resets, front={"trace": str(file)}, limits={"tries": 1}) as world:
            assert (await world.stream()).status == 502

    run(work())
    found = read_route_trace(file)
    assert ENDS[found.requests["how"][0]] is End.REFUSED
    workload, _ = read_trace(file)
    assert workload.output[0] == 128  # the mean of its class stands for what it would have had


def test_damage_is_refused_and_a_cut_line_left_out(tmp_path: Path) -> None:
    file = tmp_path / "router.jsonl"
    written(file, 6)
    text = file.read_text()
    file.write_text(text + text.splitlines()[0][:40])
    assert len(read_route_trace(file).requests["id"]) == 6
    record = json.loads(text.splitlines()[0])
    for wrong in ({"arrival": "x"}, {"route": 2}, {"class": 3}, {"prompt": None}):
        file.write_text(json.dumps({**record, **wrong}) + "\n" + text)
        with pytest.raises(InputError, match="changed"):
            read_route_trace(file)
    file.write_text("")
    with pytest.raises(InputError, match="no request"):
        read_route_trace(file)


def test_the_commands_read_it(tmp_path: Path) -> None:
    """`trace` as a run; `compare` as requests that other policies, or other routers, would have served."""
    file = tmp_path / "router.jsonl"
    written(file, 60)
    routers = ("least-loaded", "density-deep", "gate-and-route+")
    fleet = ["--engines", "2", "--slots", "8", *(word for name in routers for word in ("--router", name))]
    policies = ["--policy", "mixed", "--policy", "v0"]
    for words in (
        ["trace", str(file), "--out", str(tmp_path / "run")],
        ["compare", "--trace", str(file), *policies, "--out", str(tmp_path / "policies")],
        ["compare", "--trace", str(file), *fleet, "--out", str(tmp_path / "routers")],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert "TTFT" in done.stdout
        assert "The engine is busy" not in done.stdout  # the router sees no steps
    for name in routers:
        run = Run.load(tmp_path / "routers" / name)
        assert len(run.requests["id"]) == 60
        assert sorted({kind["name"] for kind in run.kinds}) == ["default", "long"]
