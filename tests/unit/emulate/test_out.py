"""`--out`: what was served can be read back as a run."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest
from calls_of_emulator import FAST, PATIENCE, post, run, session
from test_emulate_command import MAIN, SRC, ask, started

from headgate.core.errors import InputError
from headgate.live.emulate import emulated
from headgate.record.tables import Run

LENGTHS = [3, 40, 17]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_trace_of_a_virtual_engine_tells_what_its_clients_were_told(tmp_path, asynchronous):
    words = FAST | {"virtual": True, "hold": 3, "speed": 1.0, "asynchronous": asynchronous}
    out = tmp_path / "served"

    async def main():
        async with emulated(**words, out=str(out)) as urls, session() as client:
            bodies = [{"prompt": "x" * 400, "max_tokens": each, "ignore_eos": True} for each in LENGTHS]
            calls = (
                post(client, urls[0], body, **{"x-emulate-arrival": str(0.01 * number)})
                for number, body in enumerate(bodies)
            )
            return [told["emulated"] for _, told in await asyncio.gather(*calls)], urls.clock.wall(0.0)

    told, zero = run(main())
    found = Run.load(out / "engine-0.jsonl")
    assert found.meta["driver"] == "emulator" and found.meta["outcome"] == "finished"
    head = json.loads((out / "engine-0.jsonl").read_text().partition("\n")[0])
    assert head["zero"] == zero  # times of the trace can be compared with a client's
    assert found.requests["prompt"].tolist() == [100] * 3
    assert found.requests["output"].tolist() == LENGTHS
    for name in ("arrival", "admitted", "finished"):
        assert found.requests[name].tolist() == pytest.approx([each[name] for each in told], abs=1e-9)
    assert found.requests["first_token"].tolist() == pytest.approx([each["first"] for each in told])


def test_the_command_leaves_run_folders_that_report_reads(tmp_path):
    out = tmp_path / "served"
    with started("--speed", "20", "--engines", "2", "--policy", "eb:refill=2", "--out", str(out)) as child:
        urls = [child.stdout.readline().split()[2] for _ in range(2)]
        for url in urls:
            ask(url, {"prompt": "hi", "max_tokens": 5, "ignore_eos": True}).close()
        child.send_signal(signal.SIGTERM)
        said, _ = child.communicate(timeout=PATIENCE)
    assert f"run folder: {out / 'engine-1'}" in said
    found = Run.load(out / "engine-1")
    assert found.meta["policy"] == "eb" and found.meta["parameters"]["refill"] == 2
    assert found.requests["output"].tolist() == [5]
    command = [sys.executable, "-c", MAIN, "report", str(out), "--out", str(tmp_path / "page.html")]
    subprocess.run(command, check=True, env={"PYTHONPATH": str(SRC)}, stdout=subprocess.DEVNULL)
    assert "engine 1" in (tmp_path / "page.html").read_text()


def test_a_folder_with_something_in_it_is_refused_and_a_failed_start_leaves_none(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()

    async def main(**words):
        async with emulated(**FAST, **words):
            raise AssertionError("it started")

    with pytest.raises(InputError, match="not empty"):
        run(main(out=str(tmp_path / "full")))
    with pytest.raises(InputError, match="cannot listen"):
        run(main(out=str(tmp_path / "new"), host="192.0.2.1"))
    assert not (tmp_path / "new").exists()
