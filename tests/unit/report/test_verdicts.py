from __future__ import annotations

from dataclasses import replace

import pytest
from some_runs import served

from as_text import as_text
from headgate.experiment.run import Prepared, carry_out
from headgate.experiment.settings import experiment
from headgate.report.document import number
from headgate.report.runs.page import scene_chapter
from headgate.report.runs.scenes import load_grid, scene_of, served_rates
from headgate.report.runs.verdict import comparison_verdict, load_verdict, scene_verdict
from headgate.stats.comparison import BETTER, SAME, TOO_FEW, WORSE, Comparison, Difference, MetricRow, Whole
from headgate.stats.figures import Estimate


def difference(percent: float, verdict: str, half: float | None = None) -> Difference:
    half = half or (1.0 if verdict in (BETTER, WORSE) else 10.0)
    span = Estimate(percent, percent - half, percent + half)
    return Difference(10 * (1 + percent / 100), span, span, verdict)


def comparison(**metrics: dict[str, tuple[float, str] | tuple[float, str, float]]) -> Comparison:
    """Percent and verdict of each policy, metric by metric; half the interval, where it matters."""
    rows = []
    for metric, others in metrics.items():
        name, higher = metric.replace("_", " "), metric in ("request_throughput", "goodput")
        found = {policy: difference(*each) for policy, each in others.items()}
        best = max(found, key=lambda policy: found[policy].value * (1 if higher else -1))
        level = tuple(
            policy for policy in found if policy != best and found[policy].verdict == found[best].verdict
        )
        rows.append(
            MetricRow(name, "s", higher, "by seed", Estimate(10.0, 9.0, 11.0), found, best, level, ("mixed",))
        )
    return Comparison("mixed", ("mixed", *found), 1, "", tuple(rows), ())


def test_a_gain_comes_with_its_interval_and_its_price():
    found = comparison_verdict(
        comparison(
            request_throughput={"eb": (6.0, BETTER)},
            mean_TTFT={"eb": (0.5, SAME)},
            p99_ITL={"eb": (230.0, WORSE)},
        )
    )
    assert found == (
        "eb serves 6.0 % more requests than mixed (95 % interval +5.0 to +7.0 %), with no difference seen in "
        "mean TTFT and p99 ITL 3.3 times as high."
    )


def test_who_cannot_be_told_from_the_best_is_named():
    found = comparison_verdict(comparison(request_throughput={"eb": (6.0, BETTER), "eb+": (5.5, BETTER)}))
    assert "(95 % interval +5.0 to +7.0 %), the most of 2 tried" in found
    assert found.endswith("in requests served eb+ cannot be told from it.")


def test_nothing_to_gain_is_said():
    found = comparison_verdict(
        comparison(request_throughput={"eb": (0.1, SAME, 0.3)}, mean_TTFT={"eb": (3.0, WORSE)})
    )
    assert found.startswith(
        "No policy is seen to serve more requests than mixed: at this load there is no throughput to gain "
        "(95 % intervals end at +0.4 %)"
    )
    assert "no latency is seen to be better" in found


def test_what_intervals_cannot_leave_out_is_not_denied():
    found = comparison_verdict(comparison(request_throughput={"eb": (1.0, SAME), "v0": (-4.0, WORSE)}))
    assert "than mixed at this load, though 95 % intervals leave room for 11.0 % (v0 serves fewer)" in found
    assert "no throughput to gain" not in found


def test_latency_is_what_is_left_to_win():
    found = comparison_verdict(
        comparison(
            request_throughput={"v0": (0.1, SAME), "eb": (-4.0, WORSE)},
            mean_TTFT={"v0": (-10.0, BETTER), "eb": (9.0, WORSE)},
        )
    )
    assert (
        "(eb serves fewer)" in found
        and "v0 has mean TTFT 10.0 % lower (95 % interval -11.0 to -9.0 %)" in found
    )


def test_too_few_requests_give_no_verdict():
    assert comparison_verdict(comparison(request_throughput={"eb": (50.0, TOO_FEW)})).startswith(
        "Too few requests"
    )


def test_loads_at_which_nothing_is_gained_are_named():
    scenes = []
    for rate, gain in ((4.0, (0.0, SAME, 0.5)), (40.0, (5.0, BETTER))):
        scene = scene_of({"mixed": [served("mixed", rate=rate)]})
        price = {"eb": (0.2, SAME)} if gain[1] == BETTER else {"eb": (-7.0, BETTER)}
        scene.__dict__["comparison"] = comparison(request_throughput={"eb": gain}, mean_TTFT=price)
        scenes.append(scene)
    assert load_verdict(scenes) == (
        "At 40 requests/s eb serves 5.0 % more requests than mixed (95 % interval +4.0 to +6.0 %), with no "
        "difference seen in mean TTFT; at 4 requests/s there is no throughput to gain (95 % intervals end at "
        "+0.5 %)."
    )
    alone = load_verdict(scenes[:1])
    assert alone.startswith(
        "No policy is seen to serve more requests than mixed: at 4 requests/s there is no"
    )
    assert alone.endswith("At 4 requests/s eb has mean TTFT 7.0 % lower (95 % interval -8.0 to -6.0 %).")
    twice = load_verdict([scenes[1], scenes[1]])
    assert "+6.0 %), the most of all loads, with no difference seen in mean TTFT." in twice
    scenes[0].__dict__["comparison"] = comparison(request_throughput={"eb": (9.0, TOO_FEW)})
    assert "at 4 requests/s no gain is seen" in load_verdict(scenes)


@pytest.mark.parametrize("policy", ["mixed", "eb+"])
def test_one_run_is_summed_up(policy):
    said = scene_verdict(scene_of({policy: [served(policy)]}))
    assert said.startswith(f"{policy} serves ") and "a first token after" in said and "busy" in said


def test_in_overload_the_rate_is_that_of_the_whole_run():
    requests = {"prompt": 400.0, "output": 100.0, "rate": 200.0, "requests": 800, "slots": 128}
    run = carry_out(Prepared(experiment(requests)), "mixed", {})
    scene = scene_of({"mixed": [run]})
    (low, high), served_in_all = run.span(), int(run.completed().sum())
    rate = served_in_all / (high - low)
    assert scene_verdict(scene).startswith(f"mixed serves {number(rate)} requests/s over the whole run: ")
    said = as_text(scene_chapter(scene))
    assert f"most served is {number(rate)}" in " ".join(said.split()) and "Above 100 %" not in said


def test_a_latency_that_is_won_comes_with_the_one_that_pays_for_it():
    found = comparison_verdict(
        comparison(
            request_throughput={"split": (0.1, SAME, 0.3)},
            mean_TTFT={"split": (2350.0, WORSE)},
            mean_TPOT={"split": (-58.0, BETTER)},
        )
    )
    assert "What differs: split has mean TPOT 58.0 % lower" in found
    assert found.endswith("; split pays with mean TTFT 24.5 times as high.")


def test_latencies_of_background_work_are_no_price():
    found = comparison(
        request_throughput={"keep": (0.1, SAME, 0.3)},
        mean_TTFT={"keep": (29.0, WORSE)},
        goodput={"keep": (16270.0, BETTER, 220.0)},
    )
    said = comparison_verdict(found, background=True)
    assert "TTFT" not in said
    assert said.endswith(
        "keep has the share of kept promises 163.7 times as high (95 % interval 161.5 to 165.9 times)."
    )
    assert "keep pays with mean TTFT 29.0 % higher" in comparison_verdict(found)


def test_loads_of_one_policy_say_up_to_where_it_keeps_up():
    low, high = (scene_of({"mixed": [served("mixed", rate=rate)]}) for rate in (4.0, 400.0))
    assert load_verdict([low]) == "mixed keeps up with every load tried, up to 4 requests/s."
    both = load_verdict([low, high])
    assert both.startswith(
        "mixed keeps up with 4 requests/s and falls behind at 400 requests/s; it serves most at 400 "
    )
    assert load_verdict([high]).startswith("mixed falls behind at 400 requests/s already; it serves most at ")
    whole, row = served_rates(high.runs["mixed"][0])["Requests"].value, load_grid([high]).rows[0]
    assert both.endswith(f": {number(whole)} requests/s.") and row[2].text == f"{number(whole)}!"
    closed = scene_of({"mixed": [served("mixed")]})
    assert load_verdict([closed]).startswith("mixed serves most at 48 clients: ")


def test_an_overload_is_told_by_what_can_be_compared():
    scene = scene_of({name: [served(name, requests=400, rate=400.0)] for name in ("mixed", "eb")})
    said = scene_verdict(scene)
    assert said.startswith(
        "No verdict on throughput: in the measured window mixed and eb have a growing backlog. "
        "Requests/s served over the whole run: mixed "
    )
    assert "more requests" not in said
    assert load_verdict([scene]).startswith("At 400 requests/s: No verdict on throughput: ")
    slow = scene_of({name: [served(name, requests=400, rate=4.0)] for name in ("mixed", "eb")})
    both = load_verdict([slow, scene])
    assert (
        "at 4 requests/s there is no throughput to gain" in both and "At 400 requests/s: No verdict" in both
    )


def test_who_keeps_up_with_the_load_is_said():
    found = comparison(request_throughput={"eb": (9.0, "backlog grows")})
    found = replace(
        found, doubts={"mixed": "backlog grows"}, whole={"mixed": Whole(10, 2.0), "eb": Whole(10, 1.0)}
    )
    assert comparison_verdict(found) == (
        "No verdict on throughput: in the measured window mixed has a growing backlog, eb keeps up with what "
        "is offered. Requests/s served over the whole run: mixed 5.000 and eb 10.00."
    )
