"""`headgate sweep`: a grid of runs, resumed where it stopped."""

from __future__ import annotations

import json
import sys

import pytest

from headgate.experiment.run import carry_out_all

SMALL = ["--requests", 60, "--prompt", 60, "--output", 20, "--slots", 16, "--jobs", 1]


def test_a_grid_of_loads_policies_and_seeds(headgate, tmp_path):
    said = headgate(
        "sweep", "--policy", "mixed", "--policy", "v0", "--over", "clients=4,16", "--seeds", 2, *SMALL,
        "--out", "grid", "--json", "grid.json",
    )  # fmt: skip
    assert said.code == 0 and max(map(len, said.out.splitlines())) <= 80
    document = json.loads((tmp_path / "grid.json").read_text())
    assert document["over"] == {"clients": [4, 16]} and len(document["points"]) == 8
    assert len(list((tmp_path / "grid").rglob("run.json"))) == 8
    html = (tmp_path / "grid/report.html").read_text(encoding="utf-8")
    assert "Requests served against load" in html and "From 4 clients to 16 clients" in html


def test_parameters_of_policies_make_variants_and_the_load_is_the_axis(headgate):
    words = ["--policy", "mixed", "--policy", "eb", "--over", "refill=2,4", "--over", "slots=8,16"]
    said = headgate("sweep", *words, "--over", "clients=4,16", *SMALL, "--out", "grid", "--json", "-")
    points = json.loads(said.out)["points"]
    assert {point["at"] for point in points} == {4, 16}
    labels = {point["label"] for point in points}
    assert labels == {
        f"{one}, slots={slots}" for one in ("mixed", "eb:refill=2", "eb:refill=4") for slots in (8, 16)
    }


def test_one_policy_is_enough_and_one_without_a_load_too(headgate):
    assert headgate("sweep", "--over", "rate=5,10", *SMALL, "--out", "one").code == 0
    said = headgate("sweep", "--policy", "eb", "--over", "refill=2,4,8", *SMALL, "--out", "two")
    assert said.code == 0 and "eb:refill=8" in said.out


def test_a_policy_that_breaks_costs_its_own_runs_and_is_named(headgate, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from headgate import Mixed\n\n\nclass Broken(Mixed):\n"
        "    def plan(self, view):\n        raise ValueError('boom')\n"
    )
    words = ["--policy", "mixed", "--policy", "mine.py:Broken", "--over", "clients=2,4", *SMALL]
    said = headgate("sweep", *words, "--out", "grid", "--json", "grid.json")
    assert said.code == 1 and "2 of 4 runs did not end" in said.err and "ValueError: boom" in said.err
    points = json.loads((tmp_path / "grid.json").read_text())["points"]
    assert sorted(point["outcome"][:8] for point in points) == ["failed: "] * 2 + ["finished"] * 2
    assert (tmp_path / "grid/report.html").exists()


def test_it_goes_on_where_it_stopped(headgate, tmp_path, monkeypatch):
    command = ["sweep", "--over", "clients=2,4,8", *SMALL, "--out", "grid"]

    def broken(tasks, jobs, words):
        for number, found in enumerate(carry_out_all(tasks, jobs, words)):
            if number == 2:
                raise KeyboardInterrupt
            yield found

    with monkeypatch.context() as patched:
        patched.setattr("headgate.experiment.run.carry_out_all", broken)
        said = headgate(*command)
    assert said.code == 130 and "2 of 3 runs stand in grid" in said.err and "--out grid goes on" in said.err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "grid").rglob("run.json")}
    said = headgate(*command)
    assert said.code == 0 and "2 of 3 runs are there already" in said.out
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    said = headgate("sweep", "--over", "clients=2,4,8", *SMALL, "--out", "grid", "--prompt", 61)
    assert said.code == 2 and "another sweep" in said.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ("--over rate=2,4,8",)),
        (["--over", "rate"], ("NAME=VALUE",)),
        (["--over", "rate=2,2"], ("twice",)),
        (["--over", "rate=2", "--over", "rate=4"], ("--over rate is there twice",)),
        (["--over", "policy=mixed,v0"], ("--policy",)),
        (["--over", "rat=2,4"], ("rat", "rate")),
        (["--over", "rate=2,-4"], ("rate", "above 0")),
        (["--policy", "eb:refill=2", "--over", "refill=2,4"], ("sets refill",)),
        (["--over", "rate=2,4", "--out", "x", "--report", "no/where"], ("--report",)),
    ],
)
def test_bad_input_is_one_line(refused, args, words):
    refused(["sweep", *args, *SMALL], *words)


def test_a_policy_is_left_out_where_it_is_impossible(headgate, refused):
    """At some points; one that is possible nowhere is a mistake."""
    grid = ["sweep", "--policy", "mixed", "--policy", "eb", "--over", "rate=2,4", "--over", "slots=8,64"]
    said = headgate(*grid, "--over", "refill=4,16", *SMALL).out
    assert said.count("note: eb:refill=16 is left out at 2 of 4 points: eb: refill=16 is outside 1..8") == 1
    assert "eb:refill=16, slots=64" in said and "eb:refill=16, slots=8" not in said
    refused([*grid, "--over", "refill=4,400", *SMALL], "refill=400")
    twice = ["sweep", "--policy", "eb:refill=16", "--policy", "eb:refill=16", "--over", "slots=8,64", *SMALL]
    refused(twice, "is there twice")


def test_labels_stay_where_a_policy_is_left_out_and_a_setting_may_be_that_of_one(headgate):
    policies = ["--policy", "mixed", "--policy", "eb", "--set", "refill=8", "--over", "slots=4,16"]
    routers = ["--router", "round-robin", "--router", "power-of-two", "--engines", 2]
    routers += ["--card", "derived:llama-3.1-8b@h200"]  # there are other notes, too
    said = json.loads(headgate("sweep", *policies, *routers, *SMALL, "--json", "-").out)
    both = {"round-robin mixed", "power-of-two mixed"}
    assert {each["label"] for each in said["points"] if each["at"] == 4} == both
    assert {each["label"] for each in said["points"] if each["at"] == 16} > both
    assert said["left_out"][0].startswith("eb is left out at 1 of 2 points") and len(said["left_out"]) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["sweep", "--over", "rate=2,4", *SMALL],
        ["plan", "capacity", "--slo", "ttft=1s@p50", *SMALL],
        ["advise", "--rate", 2, "--slo", "ttft=1s@p50", *SMALL],
    ],
)
def test_without_ray_it_is_one_line(refused, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    refused(
        [*command, "--on", "ray"], "--on ray is in package headgate-ray; install it: pip install ./rayserve"
    )
    refused([*command, "--on", "rye"], "'rye' is not known; write ray, or ray:ADDRESS")


def test_a_policy_file_that_changed_is_not_taken_for_the_old_one(headgate, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    file = tmp_path / "mine.py"
    file.write_text("from headgate import Mixed\nclass Mine(Mixed):\n    pass\n")
    command = ["sweep", "--policy", "mine.py:Mine", "--over", "clients=2,4", *SMALL, "--out", "grid"]
    assert headgate(*command).code == 0
    assert "2 of 2 runs are there already" in headgate(*command).out
    file.write_text(file.read_text() + "    changed = True\n")
    refused(command, "another sweep")


def test_the_rates_of_a_sweep_are_said_once(headgate, refused):
    said = headgate("sweep", "--over", "rate=5,10", *SMALL, "--out", "one")
    assert "Poisson arrivals, 5 requests/s or 10 requests/s." in " ".join(said.out.split())
    refused(["sweep", "--over", "rate=1,x", *SMALL], "--over rate: x is not allowed; give a number")


@pytest.mark.parametrize(
    ("words", "place", "why"),
    [
        (["clients=2,40"], "clients 40", "Not stationary: closed loop, but only 1.5 requests per client"),
        (["rate=1,900"], "rate 900", "Overloaded: the backlog grows. Latencies and kept promises get worse"),
        (["slots=16,64", "--rate", 900], "slots 16, slots 64", "Overloaded: the backlog grows."),
    ],
)
def test_rates_that_say_nothing_are_marked_with_the_reason(headgate, tmp_path, words, place, why):
    small = [*SMALL[:-4], "--jobs", 1, *(["--slots", 16] if "--rate" not in words else [])]
    said = headgate("sweep", "--policy", "mixed", "--over", *words, *small, "--out", "grid")
    text, html = " ".join(said.out.split()), (tmp_path / "grid/report.html").read_text(encoding="utf-8")
    note = f"! Not compared per s, at {place}: {why}"
    assert text.count("! Not compared") == 1 and note in text and note in html
    rows = [line.split()[1] for line in said.out.splitlines() if line.startswith("mixed ")]
    assert [rate.endswith("!") for rate in rows] == [place.count("slots") == 2, True]


def test_a_rate_above_the_bound_is_told_with_it(headgate):
    words = ["--clients", 640, "--requests", 700, "--prompt", 60, "--output", 200, "--jobs", 1]
    said = headgate("sweep", "--over", "slots=512,600", *words, "--out", "grid")
    text = " ".join(said.out.split())
    assert text.count("At slots 600: On the measured requests no policy serves more than") == 1


def test_a_run_that_serves_nothing_says_the_cause_alone(headgate, tmp_path):
    body = "    def plan(self, view):\n        raise OSError('boom')\n"
    (tmp_path / "mine.py").write_text(f"from headgate import Mixed\nclass Broken(Mixed):\n{body}")
    said = headgate("simulate", "--policy", "mine.py:Broken", "--requests", 20)
    assert said.code == 1 and "OSError: boom" in said.err and not said.out
