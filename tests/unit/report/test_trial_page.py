"""A trial's report: the answer first, only figures that may be compared, and what they mean."""

from __future__ import annotations

import io
import math

import pytest
from check_html import read

from headgate.core.request import Slo
from headgate.live.trial.arms import Arm
from headgate.live.trial.book import Book, judge
from headgate.live.trial.trial import Outcome
from headgate.report.runs.trial import _ends, answer, trial_page
from headgate.report.terminal import show
from headgate.stats.switchback import KEPT, TTFT, Change, Looks


def book(kept, ttft=(0.2, 0.2), rounds=8, waiting=0):
    """Rounds of ten requests for each arm, of which so many keep their promise."""
    made = Book({None: Slo(1.0, None)})
    at = 0.0
    for number in range(rounds):
        for arm in (0, 1):
            made.begin(arm, number, at, 0.0)
            for place in range(10):
                seen = made.arrived(at + place, "chat" if place % 2 else "batch")
                late = 5.0 if place >= kept[arm] + (number % 2) else 0.0
                made.first_token(seen, at + place + ttft[arm] * (1 + 0.1 * (number % 3)) + late)
                made.left(seen, at + place + 6.0, True, 1)
            at += 30.0
            made.waiting = waiting * (number + 1)
            made.end(at)
            made.waiting = 0
    return made


def outcome(made, primary=KEPT, **words):
    findings = judge(made, ("mixed", "keep"), primary, 30, 5, Looks(), ended=True)
    return Outcome(findings, made, **words)


ARMS = Arm("mixed", {"policy": "mixed", "ttft": "1s"}), Arm("keep", {"policy": "keep", "ttft": "1s"})


def page_of(found):
    about = {"date": "2026-11-18T07:00:00+00:00"}
    return trial_page(found, ARMS, {None: Slo(1.0, None)}, about, ["trial", "--arm", "keep"])


def text(found):
    out = io.StringIO()
    show(page_of(found), out)
    return " ".join(out.getvalue().split())


def test_a_better_arm():
    found = outcome(book((4, 8)))
    assert answer(found.findings).startswith(
        "keep is better than mixed: promises kept 85.0 % instead of 45.0 %, 40.0 "
    )
    page = text(found)
    assert "keep beside mixed" in page and "+40.0 points" in page and "class batch" in page
    assert "Light load: throughput is what arrives" in page and "starts fresh" in page
    from headgate.report.html.page import render  # after the document it shows

    html = render(page_of(found))
    read(html)
    assert "<svg" in html and "Round by round" in html and "prefers-color-scheme" in html


def test_a_worse_one_and_none():
    assert "keep is worse than mixed" in answer(outcome(book((8, 4))).findings)
    assert answer(outcome(book((10, 10))).findings).startswith(
        "No difference between keep and mixed: promises kept 100.0 % and 100.0 %, less than 1 point apart"
    )


def test_what_cannot_be_told():
    assert "Cannot tell: 4 rounds of the 6 that are needed." in text(outcome(book((4, 8), rounds=4)))
    wild = book((5, 5), ttft=(0.2, 0.21))
    for number, block in enumerate(wild.blocks):
        block.by_class["chat"].ttft *= 1 + 3 * (number * 7 % 5)
    said = answer(outcome(wild, TTFT).findings)
    assert said.startswith("Cannot tell yet whether keep changes TTFT, mean: ")
    heavy = text(outcome(book((4, 8), waiting=3), TTFT))
    assert (
        "Cannot tell: TTFT, mean cannot be compared on a server whose state is overload; --primary kept can."
        in heavy
    )
    assert "Only promises are compared; lower the load." in heavy and "TTFT, p95" not in heavy


def test_an_arm_that_fails_requests_wins_no_waits():
    made = book((8, 8), ttft=(0.2, 0.1))
    for block in made.blocks[1::2]:
        block.by_class["chat"].failed += 1
    failing = outcome(made, TTFT)
    assert answer(failing.findings) == (
        "Cannot tell: 10.0 % of the requests failed under keep and 0.0 % under mixed, "
        "so TTFT is not compared."
    )
    assert "TTFT, p95" not in text(failing) and "promises kept" in text(failing) and not failing.findings.told
    assert "TTFT is not compared" in text(outcome(made))
    assert "keep is better than mixed: TTFT" in answer(outcome(book((8, 8), ttft=(0.2, 0.1)), TTFT).findings)


def test_what_was_compared_and_when_is_said():
    page = text(outcome(book((4, 8))))
    assert "date 2026-11-18T07:00:00+00:00 promises TTFT ≤ 1 s" in page
    assert "mixed policy = mixed 80 0" in page and "keep policy = keep 80 0" in page


def test_intervals_without_an_end_are_told_in_words():
    few = text(outcome(book((4, 8), rounds=4)))
    assert "cannot be bounded yet cannot tell" in few and "any" not in few.split()
    made = book((10, 10), ttft=(0.2, 0.2), rounds=8)
    for block in made.blocks[::2][:7]:  # the baseline's mean rests on one round
        block.by_class["chat"].ttft *= 1e-4
        block.by_class["batch"].ttft *= 1e-4
    assert "the change cannot be bounded yet. No end is in sight." in answer(outcome(made, TTFT).findings)


@pytest.mark.parametrize("note", ["this machine is too slow", "3 requests failed"])
def test_what_makes_figures_mean_less_is_said(note):
    found = outcome(book((4, 8)), stopped="interrupted; the server is back at its settings", notes=(note,))
    assert note in text(found).replace(note.capitalize(), note) and "ended interrupted" in text(found)


def test_a_machine_that_is_too_slow_gets_no_verdict():
    found = text(outcome(book((4, 8)), notes=("this machine is too slow: free a core",), too_slow=True))
    assert "Cannot tell: this machine is too slow for this load." in found and "is better" not in found


def test_an_interval_down_to_nothing_has_no_lower_end():
    assert _ends(TTFT, Change(1.0, 1.0, 0.0, -0.9996, math.inf)) == "cannot be bounded yet"
    assert _ends(TTFT, Change(1.0, 1.0, 0.0, -0.9996, 0.1)) == "+10.0 or less"
