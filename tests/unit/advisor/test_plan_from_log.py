"""A fluid plan from a router's trace: what was drawn comes back, censored requests included."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.advisor.fluid_plan import logged_demand
from headgate.cli import app
from headgate.core.errors import InputError
from router_logs import line, written


def test_rates_lengths_and_patience_come_back(tmp_path: Path) -> None:
    found = logged_demand(str(written(tmp_path / "router.jsonl")))
    flows = {flow.name: flow for flow in found.flows}
    assert set(flows) == {"chat", "batch"}
    assert flows["chat"].rate == pytest.approx(3.0, rel=0.05)
    assert flows["batch"].rate == pytest.approx(1.0, rel=0.08)
    assert flows["chat"].prompt == 300
    # a mean over those that finished would be 67: long ones are cut off more often
    assert flows["chat"].output == pytest.approx(100.0, rel=0.05)
    assert flows["batch"].output == pytest.approx(20.0, rel=0.08)
    assert 1 / flows["chat"].impatience == pytest.approx(5.0, rel=0.1)
    assert flows["batch"].impatience == 0
    assert not found.notes


def test_what_is_rough_is_said(tmp_path: Path) -> None:
    file = tmp_path / "router.jsonl"
    lines = [line("a", n, 0.1, 10) for n in range(40)] + [line("b", 3.0, 1.0, 0, "refused")]
    lines += [line("c", 1.0, 1.0, 0, "client-gone"), line("c", 2.0, 1.0, 7)]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = logged_demand(str(file))
    assert [flow.name for flow in found.flows] == ["a", "b", "c"]
    said = "\n".join(found.notes)
    assert "no request of class b finished" in said
    assert "1 requests of class c finished" in said and "1 clients of class c left the queue" in said
    assert found.flows[1].output == pytest.approx(407 / 41)


def test_what_tells_no_rate_or_length_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "router.jsonl"
    file.write_text(json.dumps(line("a", 1.0, 0.1, 10)) + "\n")
    with pytest.raises(InputError, match="no rate is known"):
        logged_demand(str(file))
    file.write_text("".join(json.dumps(line("a", n, 0.1, 0, "refused")) + "\n" for n in range(3)))
    with pytest.raises(InputError, match="no request of the trace finished"):
        logged_demand(str(file))


def test_the_command_plans_from_it(tmp_path: Path) -> None:
    file, out = written(tmp_path / "router.jsonl", 300.0), tmp_path / "plan.json"
    words = ["plan", "fluid", "--engines", "2", "--slots", "32", "--from-log", str(file)]
    done = CliRunner().invoke(app, [*words, "--json", str(out)])
    assert done.exit_code == 0, done.output
    plan = json.loads(out.read_text())
    assert plan["classes_from"].endswith("router.jsonl")
    assert {each["name"] for each in plan["classes"]} == {"chat", "batch"}
    assert sum(each["arrivals"] for each in plan["classes"]) == pytest.approx(4.0, rel=0.1)
    for more, said in ((["--class", "x:prompt=1,output=1,rate=1"], "--class"), (["--rate", "3"], "--rate")):
        refused = CliRunner().invoke(app, [*words, *more])
        assert isinstance(refused.exception, InputError) and said in str(refused.exception)


def test_hits_that_engines_told_of_are_no_prefill_work(tmp_path: Path) -> None:
    file = tmp_path / "router.jsonl"
    lines = [{**line("a", n, 0.1, 10), "prompt": 400, "cached": 100 + n % 2 * 200} for n in range(40)]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    (flow,) = logged_demand(str(file)).flows
    assert (flow.prompt, flow.cached) == (400.0, pytest.approx(200.0))
    said = CliRunner().invoke(app, ["plan", "fluid", "--engines", "2", "--from-log", str(file)])
    assert "prompt tokens in prefix caches are paid for but no prefill work: a 50 %" in " ".join(
        said.stdout.lower().split()
    )
