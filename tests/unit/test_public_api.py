"""The public names: each is there, says what it is for, and its example runs."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headgate

NAMES = [name for name in headgate.__all__ if not name.startswith("__")]
DOCUMENTED = [name for name in NAMES if name not in ("ALL", "NONE")]  # those two are members of an enum
WITHOUT_EXAMPLE = ("InputError", "RunError")


def test_every_name_is_there_and_nothing_else():
    assert dir(headgate) == sorted(headgate.__all__)
    assert len(NAMES) < 45
    for name in NAMES:
        assert getattr(headgate, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = headgate.simulat


@pytest.mark.parametrize("name", DOCUMENTED)
def test_its_docstring_has_an_example_that_runs(name):
    thing = getattr(headgate, name)
    text = inspect.getdoc(thing) or ""
    assert len(text.split()) >= 8, "say what it is for"
    if name in WITHOUT_EXAMPLE:
        return
    assert "Examples:" in text and ">>>" in text
    parsed = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    said: list[str] = []
    outcome = doctest.DocTestRunner(verbose=False).run(parsed, out=said.append)
    assert outcome.attempted and not outcome.failed, "".join(said)


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, headgate; print([n for n in ('numpy', 'scipy', 'pydantic', 'rich') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_fleet_that_fails_and_one_without_engines():
    engine = headgate.card_engine("linear-h200-qwen3-8b", slots=8)
    requests = headgate.Workload.of([100] * 4, [20] * 4)

    class Stuck(headgate.RoutePolicy):
        def route(self, fleet):
            return headgate.Routing()

    with pytest.raises(headgate.RunError, match="Stuck"):
        headgate.simulate_fleet(engine, "mixed", Stuck(), requests, engines=2)
    with pytest.raises(headgate.InputError, match="at least 1"):
        headgate.simulate_fleet(engine, "mixed", "round-robin", requests, engines=0)
    with pytest.raises(headgate.InputError, match="unknown router 'round-rob'"):
        headgate.simulate_fleet(engine, "mixed", "round-rob", requests, engines=2)


def test_a_fleet_with_a_policy_by_role_is_the_fleet_of_the_command_line(tmp_path):
    """The same requests, engines and router from Python and from flags: the same times."""
    from headgate.experiment.run import Prepared, carry_out
    from headgate.experiment.settings import experiment

    settings = {"engines": 4, "rate": 40.0, "prompt": 300.0, "output": 60.0, "requests": 200, "slots": 16}
    prepared = Prepared(experiment(settings))
    theirs = carry_out(prepared, "mixed", {}, router=("split", {"prefill": "2"}))
    engine = headgate.card_engine("cal-h200-qwen3-8b", slots=16)
    ours = headgate.simulate_fleet(
        engine,
        lambda role: headgate.Mixed(engine.running, engine.batch_tokens),
        "split:prefill=2",
        prepared.workload,
        engines=4,
    )
    assert ours.meta["roles"] == theirs.meta["roles"] == ["prefill", "prefill", "decode", "decode"]
    assert ours.requests["finished"].tolist() == theirs.requests["finished"].tolist()


def test_runs_are_compared_alone_or_by_seed():
    engine = headgate.card_engine("linear-h200-qwen3-8b", slots=16)
    workloads = [
        headgate.generate(
            200,
            seed=seed,
            prompt=headgate.length_law("uniform", 200),
            output=headgate.length_law("uniform", 40),
        )
        for seed in (1, 2)
    ]
    runs = {name: [headgate.simulate(engine, name, each) for each in workloads] for name in ("mixed", "v0")}
    found = headgate.compare(runs, baseline="v0")
    assert (found.baseline, found.seeds) == ("v0", 2)
    alone = headgate.compare({name: own[0] for name, own in runs.items()})
    assert (alone.baseline, alone.seeds) == ("mixed", 1)
    with pytest.raises(headgate.InputError, match="give at least two"):
        headgate.compare({})


def test_the_page_of_the_api_has_every_name():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: headgate\.(\w+)$", page, re.M)
    assert sorted(listed) == sorted(DOCUMENTED)
    assert "`ALL`" in page and "`NONE`" in page


def test_the_page_lists_every_name_in_a_table():
    """For readers without the site: there the generated parts are empty."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| \S", page.partition("## All names")[2], re.MULTILINE)
    assert listed == NAMES
