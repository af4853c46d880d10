"""Policies and routers that are not ours: FILE.py:CLASS, and those of installed packages by entry points."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from headgate.cli import command_of
from headgate.cli.help import PLUGGED_IN
from headgate.methods.names import PAPERS

ROOT = Path(__file__).parents[3]
SMALL = ("--requests", 40, "--rate", 20, "--prompt", 60, "--output", 20, "--slots", 8, "--engines", 2)
MODULE = '''
from headgate import BatchPolicy, Mixed
from headgate.core.fleet import Move, RoutePolicy, Routing


class Last(RoutePolicy):
    """All requests to the last engine."""

    sends_at_once = True

    def __init__(self, engines: int, skip: int = 0) -> None:
        self.to = engines - 1 - skip

    def route(self, fleet):
        waiting = [id for queue in fleet.queues.values() for id in queue]
        return Routing(tuple(Move(id, self.to) for id in waiting))


class Plain(Mixed):
    """Mixed under another name."""


class Needs(Last):
    def __init__(self, engines: int, must: float) -> None:
        super().__init__(engines)


class Abstract(RoutePolicy):
    pass


class Broken(Last):
    def route(self, fleet):
        raise KeyError("no such thing")


class Stuck(Last):
    def route(self, fleet):
        return Routing()


class Chance(Last):
    def __init__(self, engines: int) -> None:
        import random
        self.engines, self.draw = engines, random.SystemRandom()

    def route(self, fleet):
        waiting = [id for queue in fleet.queues.values() for id in queue]
        return Routing(tuple(Move(id, self.draw.randrange(self.engines)) for id in waiting))


class Outside(Last):
    def route(self, fleet):
        waiting = [id for queue in fleet.queues.values() for id in queue]
        return Routing(tuple(Move(id, 99) for id in waiting))


not_a_class = 3
'''
POINTS = """[headgate.policies]
plain = fake_extension:Plain
mixed = fake_extension:Plain
[headgate.routers]
last = fake_extension:Last
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package with these entry points where Python finds installed ones."""

    def put(points, name="fake-extension", module=MODULE):
        site = tmp_path / f"site-{name}"
        about = site / f"{name.replace('-', '_')}-1.2.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (about / "entry_points.txt").write_text(points)
        (site / "fake_extension.py").write_text(module)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(__import__("sys").modules, "fake_extension", raising=False)

    return put


@pytest.mark.usefixtures("mine")
def test_simulate_with_a_router_of_ones_own(headgate, tmp_path):
    said = headgate("simulate", *SMALL, "--router", "mine.py:Last", "--out", "run", "--json", "found.json")
    assert said.code == 0, said.err
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    assert meta["router"] in ("Last", "mine.py:Last") and meta["outcome"] == "finished"


@pytest.mark.usefixtures("mine")
def test_its_parameters_are_set_like_those_of_ours(headgate, refused, tmp_path):
    from headgate.record.tables import Run

    for text, engine in (("mine.py:Last", 1), ("mine.py:Last:skip=1", 0)):
        assert headgate("simulate", *SMALL, "--router", text, "--out", "run", "--overwrite").code == 0
        assert set(Run.load(tmp_path / "run").steps["replica"].tolist()) == {engine}
    both = ("--router", "mine.py:Last", "--set-router", "skip=1")
    assert headgate("simulate", *SMALL, *both, "--out", "run", "--overwrite").code == 0
    assert set(Run.load(tmp_path / "run").steps["replica"].tolist()) == {0}


@pytest.mark.usefixtures("mine")
def test_compare_sweep_and_plan_take_it_too(headgate, tmp_path):
    two = ("--router", "mine.py:Last", "--router", "round-robin")
    said = headgate("compare", *SMALL, *two, "--json", "compared.json")
    assert said.code == 0 and "mine.py:Last" in said.out, said.err
    said = headgate(
        "sweep", *SMALL[:2], *SMALL[4:], *two, "--over", "rate=10,20", "--jobs", 2, "--out", "grid"
    )
    assert said.code == 0 and "mine.py:Last" in said.out, said.err
    find = ("plan", "capacity", "--find", "engines", "--slo", "e2e=100s@p50", "--seeds", 1, "--jobs", 1)
    said = headgate(*find, *SMALL[:-2], "--router", "mine.py:Last", "--json", "-")
    assert said.code == 0, said.err
    assert '"router": "mine.py:Last"' in said.out


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine.py", "a file without a class; name one: mine.py:Last"),
        ("nope.py:Last", "no file nope.py; write it as my_router.py:ClassName"),
        ("mine.py:Lost", "unknown router of mine.py 'Lost'; did you mean 'Last'?"),
        ("mine.py:Plain", "Plain is no subclass of headgate.RoutePolicy; make it one"),
        ("mine.py:not_a_class", "unknown router of mine.py 'not_a_class'"),
        ("mine.py:Last:skp=1", "unknown parameter of router mine.py:Last 'skp'; did you mean 'skip'?"),
        ("mine.py:Last:skip=x", "skip='x' is not a whole number"),
        ("mine.py:Needs", "router mine.py:Needs needs must; write mine.py:Needs:must=VALUE"),
        ("mine.py:Abstract", "cannot be made: TypeError"),
    ],
)
def test_routers_that_cannot_be_made(refused, text, says):
    refused(["simulate", *SMALL, "--router", text], says)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "says"), [("Broken", "KeyError: 'no such thing'"), ("Stuck", "router Stuck"), ("Outside", "99")]
)
def test_routers_that_fail_in_a_run(headgate, name, says):
    said = headgate("simulate", *SMALL, "--router", f"mine.py:{name}")
    assert said.code == 1 and says in said.err and said.err.count("\n") == 1


def test_a_policy_is_no_router_and_the_reverse(refused, tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    refused(["simulate", *SMALL, "--policy", "mine.py:Last"], "Last is no subclass of headgate.BatchPolicy")
    refused(["simulate", *SMALL, "--router", "mine.py:Plain"], "Plain is no subclass of headgate.RoutePolicy")


# -- packages ------------------------------------------------------------------------------------------


def test_an_installed_package_offers_policies_and_routers(headgate, install):
    install(POINTS)
    said = headgate("simulate", *SMALL, "--policy", "plain", "--router", "last:skip=1", "--out", "run")
    assert said.code == 0, said.err
    assert headgate("check", "last", "--worlds", 5).code == 0


def test_doctor_lists_them_and_what_is_wrong(headgate, install):
    install(POINTS)
    said = headgate("doctor", "--no-seams", "--json", "-")
    found = json.loads(said.out)
    assert found["policies"]["plain"] == "Mixed under another name. [fake-extension 1.2]"
    assert found["routers"]["last"] == "All requests to the last engine. [fake-extension 1.2]"
    assert found["problems"] == ["policy mixed of fake-extension 1.2 is hidden by headgate's own; rename it"]
    assert said.code == 1
    told = headgate("doctor", "--no-seams").out
    assert "[fake-extension 1.2]" in told and "problem: policy mixed of fake-extension" in told


@pytest.mark.parametrize(
    ("points", "module", "says"),
    [
        ("last = fake_extension:Lost", MODULE, "AttributeError"),
        ("last = nowhere:Last", MODULE, "No module named 'nowhere'"),
        (
            "last = fake_extension:Plain",
            MODULE,
            "is no subclass of headgate.RoutePolicy; correct",
        ),
        ("last = fake_extension:not_a_class", MODULE, "is no subclass of headgate.RoutePolicy"),
        ("last = fake_extension:Last", "raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_packages_that_are_broken(headgate, refused, install, points, module, says):
    install(f"[headgate.routers]\n{points}\n", module=module)
    refused(["simulate", *SMALL, "--router", "last"], "router last of fake-extension 1.2", says)
    told = headgate("doctor", "--no-seams", "--json", "-")
    assert told.code == 1 and any(says in problem for problem in json.loads(told.out)["problems"])
    assert "last" not in json.loads(told.out)["routers"]


def test_a_name_that_two_packages_offer_is_refused(refused, install):
    for name in ("one-package", "other-package"):
        install("[headgate.routers]\nlast = fake_extension:Last\n", name)
    refused(
        ["simulate", *SMALL, "--router", "last"],
        "router last is offered by other-package 1.2 and one-package 1.2; uninstall one of the two",
    )


def test_an_unknown_name_is_looked_up_among_theirs_too(refused, install):
    install(POINTS)
    refused(["simulate", *SMALL, "--router", "lats"], "unknown router 'lats'; did you mean 'last'?")


# -- laws ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mine")
def test_check_tries_the_laws_of_routers(headgate, tmp_path):
    said = headgate("check", "mine.py:Last", "--worlds", 15, "--json", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert said.code == 0 and "2 of 2 laws kept in 15 worlds" in said.out
    assert found["router"] == "mine.py:Last" and "policy" not in found and found["kept"]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "law"), [("Broken", "ends"), ("Stuck", "ends"), ("Outside", "ends"), ("Chance", "same again")]
)
def test_a_broken_law_is_named_with_its_world(headgate, name, law):
    said = headgate("check", f"mine.py:{name}", "--worlds", 15)
    assert said.code == 1 and f"{law:12} BROKEN" in said.out and "world" in said.out


@pytest.mark.parametrize("command", PLUGGED_IN)
def test_a_command_of_a_package_that_is_not_installed_says_how_to_install_it(refused, monkeypatch, command):
    command_of.cache_clear()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **wanted: ())
    refused([*command.split(), "--help"], f"pip install ./{PLUGGED_IN[command]} in a clone")


def test_policies_and_routers_of_the_papers_say_how_to_install_them(refused, monkeypatch):
    project = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {*PAPERS} == {*project["headgate.policies"], *project["headgate.routers"]}
    monkeypatch.setattr("headgate.methods.make.entry_points", lambda **wanted: ())
    for flag, name in (("--policy", "look-ahead"), ("--router", "fi-wsp")):
        said = f"{flag[2:]} {name} is in package headgate-papers; install it: pip install ./papers in a clone"
        refused(["simulate", *SMALL, flag, name], said)
