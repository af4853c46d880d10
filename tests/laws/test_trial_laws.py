"""The known answers of a switchback, in virtual time, and forty trials of no difference."""

from __future__ import annotations

from headgate.core.request import Slo
from headgate.stats.switchback import GAP_P99, KEPT, LESS, LIGHT, MORE, OVERLOAD, SATURATED, THROUGHPUT
from trial_worlds import closed_world, findings_of, open_world


def words(findings):
    return {verdict.metric.name: verdict.word for verdict in findings.found[0].verdicts}


def test_one_policy_on_a_light_load():
    findings = findings_of(open_world(18, 900, 1), ("mixed", "mixed"), 15, 5, 900, 1)
    assert findings.state.name == LIGHT
    said = words(findings)
    assert said.pop("kept") == "same" and set(said.values()) == {"cannot tell"}


def test_one_policy_on_a_saturated_server():
    findings = findings_of(closed_world(15_000, 2), ("mixed", "mixed"), 30, 5, 600, 2, skip=60)
    assert findings.state.name == SATURATED and "kept" not in words(findings)
    change = findings.found[0].verdict(THROUGHPUT).change
    assert change.low < 0 < change.high < 0.02


def test_promises_near_capacity():
    findings = findings_of(open_world(20, 1200, 5), ("mixed", "keep"), 15, 5, 1200, 5)
    kept, gap = (findings.found[0].verdict(metric) for metric in (KEPT, GAP_P99))
    assert findings.state.name == LIGHT
    assert kept.word == MORE and 0.1 < kept.change.value < 0.3
    assert gap.word == LESS and -0.55 < gap.change.value < -0.4


def test_throughput_of_a_saturated_server():
    findings = findings_of(closed_world(15_000, 2), ("mixed", "eb+"), 30, 5, 600, 2, skip=60)
    tokens, gap = (findings.found[0].verdict(metric) for metric in (THROUGHPUT, GAP_P99))
    assert findings.state.name == SATURATED
    assert tokens.word == MORE and 0.02 < tokens.change.value < 0.036
    assert gap.word == MORE and gap.change.value > 2


def test_overload_compares_promises_alone():
    findings = findings_of(open_world(22, 600, 0), ("mixed", "keep"), 30, 5, 600, 5)
    assert findings.state.name == OVERLOAD and words(findings) == {"kept": "more"}
    assert 0.6 < findings.found[0].verdict(KEPT).change.value < 0.95


def test_two_policies_on_a_light_load():
    findings = findings_of(open_world(12, 900, 3), ("mixed", "keep"), 15, 5, 900, 3)
    assert findings.state.name == LIGHT and words(findings)["kept"] == "same"


def test_forty_trials_of_one_policy_find_no_difference():
    """Each its own traffic and its own order of arms; every gap promised, not the mean."""
    false = dict.fromkeys(("kept", "ttft", "ttft-p95", "tpot", "gap-p99"), 0)
    for seed in range(40):
        world = open_world(16, 300, 200 + seed)
        findings = findings_of(world, ("mixed", "mixed"), 15, 5, 300, seed, judged=Slo(0.3, 0.06))
        for name, word in words(findings).items():
            false[name] += word in ("more", "less")
    assert false["kept"] <= 4 and max(false.values()) <= 5, false
