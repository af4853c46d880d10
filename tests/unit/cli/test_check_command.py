"""`headgate check`: policies that break exactly one law are told so, and which world to look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "write_a_policy.py"
HEAD = """
import random
from headgate import ALL, NONE, BatchPolicy, Mixed, Plan, Until

class Mine(Mixed):
    def __init__(self, slots: int, budget: int) -> None:
        super().__init__(slots, budget)
        self.asked = 0
        self.seen = set()
"""
BREAKS = {
    "ends": """
    def plan(self, view):
        return Plan(NONE, (*view.prefilling, *view.waiting)) if view.waiting else Plan(NONE)
""",
    "same again": """
    def plan(self, view):
        return super().plan(view)._replace(chunk=random.randint(1, 10**6))
""",
    "asked twice": """
    def plan(self, view):
        self.asked += 1
        return super().plan(view)._replace(until=Until(steps=1 + self.asked % 2))
""",
    "lease": """
    def plan(self, view):
        plan = super().plan(view)
        return plan._replace(until=Until(steps=7)) if plan.prefill else plan
""",
    "refusal": """
    def admitted(self, request, now):
        self.seen.add(request.id)
    def plan(self, view):
        plan = super().plan(view)
        if getattr(self, "wanted", None) not in (None, *self.seen, *view.waiting):
            self.wanted = None
        fresh = [id for id in plan.prefill if id in view.waiting]
        if fresh and getattr(self, "wanted", None) == fresh[0] and self.at != view.now:
            raise ValueError("I asked for it before")
        self.wanted, self.at = (fresh[0] if fresh else None), view.now
        return plan
""",
    "take-over": """
    def arrived(self, request, now):
        self.seen.add(request.id)
        if request.generated:
            raise ValueError("who is this?")
""",
}


@pytest.mark.parametrize("law", BREAKS)
def test_a_broken_law_is_named_with_its_world(law, headgate, tmp_path):
    (tmp_path / "mine.py").write_text(HEAD + BREAKS[law])
    said = headgate("check", "mine.py:Mine", "--worlds", 30, "--json", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    verdicts = {verdict["law"]: verdict for verdict in found["verdicts"]}
    assert said.code == 1 and not found["kept"]
    assert verdicts[law]["broken"] and verdicts[law]["first"].startswith("world ")
    number = int(verdicts[law]["first"].split()[1].rstrip(":"))
    again = headgate("check", "mine.py:Mine", "--worlds", 1, "--seed", number)
    assert again.code == 1 and f"{law:12} BROKEN" in again.out and max(map(len, again.out.splitlines())) <= 80


def test_our_policies_and_the_example_keep_them(headgate):
    for policy in ("mixed", "eb:refill=1", f"{EXAMPLE}:HalfFull"):
        said = headgate("check", policy, "--worlds", 20)
        assert said.code == 0 and "6 of 6 laws kept in 20 worlds" in said.out


def test_parameters_that_fit_some_engines_only(headgate, refused):
    said = headgate("check", "eb", "--set", "refill=4", "--worlds", 20)
    assert said.code == 0 and "do not fit the engines of" in said.out
    refused(["check", "eb:refill=400", "--worlds", 5], "refill")
    refused(["check", "eb:refil=2"], "did you mean 'refill'?")
    refused(["check", "nobody.py:Mine"], "no file nobody.py")
    refused(["check", "mixed", "--worlds", 0], "--worlds")


CANNOT_BE_MADE = """
from headgate import BatchPolicy, Plan

class Boom(BatchPolicy):
    def __init__(self):
        raise RuntimeError("boom")
    def plan(self, view):
        return Plan()

class Unfinished(BatchPolicy):
    pass
"""


def test_a_policy_that_cannot_be_made_is_one_line(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(CANNOT_BE_MADE)
    (tmp_path / "quits.py").write_text("raise SystemExit(0)")
    for command in (["check"], ["simulate", "--requests", 5, "--policy"]):
        refused([*command, "mine.py:Boom"], "cannot be made: RuntimeError: boom (in __init__", "mine.py:6")
        refused([*command, "mine.py:Unfinished"], "abstract", "plan")
        refused([*command, "mine.py"], "name one: mine.py:Boom, mine.py:Unfinished")
        refused([*command, "quits.py:Mine"], "policy file quits.py: SystemExit: 0")
    refused(["check", "mine.py:Boom:x=1"], "unknown parameter", "none exist")


QUITS = "    def plan(self, view):\n        raise SystemExit(0)\n"
LOOPS = "    def plan(self, view):\n        while True:\n            pass\n"


def test_a_policy_that_quits_or_never_ends_keeps_no_law(headgate, tmp_path):
    (tmp_path / "quits.py").write_text(HEAD + QUITS)
    said = headgate("check", "quits.py:Mine", "--worlds", 5)
    assert said.code == 1 and "SystemExit" in said.out and "the other laws were tried in" in said.out
    (tmp_path / "loops.py").write_text(HEAD + LOOPS)
    said = headgate("check", "loops.py:Mine", "--worlds", 5, "--seconds", 1)
    assert said.code == 1 and said.err.count("\n") == 1
    assert "one world takes longer than 1 s, last seen in" in said.err and "loops.py:1" in said.err


RAISES = """
from headgate import BatchPolicy
class Raises(BatchPolicy):
    def __init__(self, slots: int, budget: int) -> None: pass
    def plan(self, view): return 1 / 0
"""


def test_a_policy_that_raises_keeps_no_law(headgate, tmp_path):
    (tmp_path / "raises.py").write_text(RAISES)
    said = headgate("check", "raises.py:Raises", "--worlds", 10)
    assert (
        said.code == 1
        and "0 of 6 laws kept" in said.out
        and " kept " not in said.out.replace("laws kept", "")
    )
