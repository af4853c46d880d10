"""Estimates of traffic: known answers, censoring, and what is assumed before enough was seen."""

from math import exp
from types import SimpleNamespace

import numpy as np
import pytest

from headgate.estimators.traffic import ENOUGH, ClassEstimate, Decaying, TrafficEstimator, WindowRate

ASSUMED = ClassEstimate(7.0, 77.0, 777.0, 0.5)


def test_terms_fade_by_the_time_constant():
    total = Decaying(10.0)
    total.add(3.0, 0.0)
    total.add(1.0, 5.0)
    assert total.value(15.0) == pytest.approx(3 * exp(-1.5) + exp(-1.0))
    level = Decaying(10.0)
    level.lasted(2.0, 0.0, 1000.0)
    assert level.value(1000.0) == pytest.approx(20.0)
    assert level.value(1010.0) == pytest.approx(20.0 * exp(-1))


def test_rates_by_window():
    rate = WindowRate(half_life=10.0)
    assert rate.value(5.0) == 0.0
    for second in range(200):
        rate.update(second / 2)
    assert rate.value(99.5) == pytest.approx(2.0, rel=0.05)
    assert rate.value(109.5) == pytest.approx(1.0, rel=0.05)  # a half-life without anybody
    young = WindowRate(half_life=1000.0)
    for second in range(21):
        young.update(float(second))
    assert young.value(20.0) == pytest.approx(1.05, rel=0.01)  # the window is as long as what was seen


class Request(SimpleNamespace):
    """As much as estimators read."""

    cached = 0


def feed(traffic, rng, seconds, rate, prompt, output, speed=50.0, patience=None, wait=0.0):
    """Poisson arrivals that wait, may give up, and then decode; everything in order of time."""
    now, events = 0.0, []
    for id in range(int(rate * seconds * 2)):
        now += rng.exponential(1 / rate)
        if now > seconds:
            break
        request = Request(id=id, kind="a", prompt=int(rng.poisson(prompt)), generated=0)
        tokens = max(1, round(rng.exponential(output)))
        gives_up = rng.exponential(patience) if patience else 1e9
        events.append((now, "arrived", request, 0))
        if gives_up < wait:
            events.append((now + gives_up, "gave up", request, 0))
            continue
        events.append((now + wait, "started", request, 0))
        events.append((now + wait + tokens / speed, "finished", request, tokens))
    begun = {}
    for when, what, request, tokens in sorted(events, key=lambda event: event[0]):
        if when > seconds:
            break
        if what == "arrived":
            traffic.arrived(request, when)
        elif what == "started":
            traffic.started(request, when)
            begun[request.id] = request, when
        elif what == "gave up":
            traffic.left(request, when, gave_up=True)
        else:
            request.generated = tokens
            traffic.finished(request, when)
            del begun[request.id]
    for request, since in begun.values():
        request.generated = int((seconds - since) * speed)
    return traffic.seen(seconds)["a"]


def test_everything_is_learned():
    traffic = TrafficEstimator({"a": ASSUMED}, half_life=200.0)
    seen = feed(traffic, np.random.default_rng(0), 2000.0, 4.0, 300.0, 1000.0, patience=10.0, wait=5.0)
    assert seen.rate == pytest.approx(4.0, rel=0.06)
    assert seen.prompt == pytest.approx(300.0, rel=0.01)
    assert seen.output == pytest.approx(1000.0, rel=0.05)
    assert 1 / seen.impatience == pytest.approx(10.0, rel=0.1)


def test_those_who_still_run_are_counted():
    """After a start most of those who have ended are short: their mean alone is far too low."""
    rng = np.random.default_rng(1)
    traffic = TrafficEstimator({"a": ASSUMED}, half_life=1000.0)
    seen = feed(traffic, rng, 20.0, 50.0, 10.0, 2000.0)  # 40 seconds each on average
    assert seen.output == pytest.approx(2000.0, rel=0.15)


def test_assumptions_count_as_a_few_requests():
    traffic = TrafficEstimator({"a": ASSUMED}, half_life=1e6)
    assert traffic.seen(0.0)["a"] == pytest.approx(ASSUMED)
    for id in range(ENOUGH):
        request = Request(id=id, kind="a", prompt=5, generated=1)
        traffic.arrived(request, 0.1)
        traffic.started(request, 0.1)
        request.generated = 5
        traffic.finished(request, 0.2)
    seen = traffic.seen(1.0)["a"]
    assert seen.prompt == pytest.approx((10 * 77 + 30 * 5) / 40, rel=1e-4)
    assert seen.output == pytest.approx((10 * 777 + 30 * 4) / 40, rel=1e-4)
    assert seen.rate == pytest.approx(30.0, rel=1e-4) and seen.impatience == pytest.approx(0.5)


def test_rates_are_believed_after_enough_arrivals_or_a_half_life():
    quiet = TrafficEstimator({"a": ASSUMED}, half_life=60.0)
    assert quiet.seen(59.0)["a"].rate == 7.0 and quiet.seen(61.0)["a"].rate == 0.0  # nobody comes at all
    assert quiet.seen(1e6)["a"][1:] == ASSUMED[1:]  # and nothing else is learned
    busy = TrafficEstimator({"a": ASSUMED}, half_life=60.0)
    for id in range(ENOUGH):
        assert busy.seen(id / 10)["a"].rate == 7.0
        busy.arrived(Request(id=id, kind="a", prompt=5, generated=0), id / 10)
    assert busy.seen(3.0)["a"].rate == pytest.approx(10.0, rel=0.05)


def test_patience_counts_those_who_wait():
    """Nobody gives up although many would have by now."""
    traffic = TrafficEstimator({"a": ASSUMED}, half_life=1e6)
    for id in range(10):
        traffic.arrived(Request(id=id, kind="a", prompt=5, generated=0), 0.0)
    assert traffic.seen(10.0)["a"].impatience == pytest.approx(10 / (20 + 100), rel=1e-3)
    patient = TrafficEstimator({"a": ASSUMED._replace(impatience=0.0)}, half_life=1e6)
    for id in range(ENOUGH):
        request = Request(id=id, kind="a", prompt=5, generated=0)
        patient.arrived(request, float(id))
        assert patient.seen(float(id))["a"].impatience == 0.0
        patient.left(request, id + 0.5, gave_up=True)
    assert patient.seen(30.0)["a"].impatience == pytest.approx(2.0, rel=1e-3)


def test_requests_that_come_back_are_no_arrivals():
    traffic = TrafficEstimator({"a": ASSUMED}, half_life=60.0)
    request = Request(id=0, kind="a", prompt=5, generated=0)
    traffic.arrived(request, 0.0)
    traffic.started(request, 1.0)
    request.generated = 50
    traffic.returned(request, 2.0)
    traffic.returned(request, 2.0)
    assert traffic.kinds["a"]._rate.count == 1 and traffic.kinds["a"]._waiting == 1
    traffic.left(request, 3.0, gave_up=False)
    assert traffic.kinds["a"]._waiting == 0 and traffic.kinds["a"]._exits == 0
    assert traffic.seen(4.0)["a"].output == pytest.approx(777.0)


def test_unknown_classes_and_takers_over():
    traffic = TrafficEstimator({}, half_life=60.0)
    traffic.adopt(Request(id=0, kind="new", prompt=8, generated=3), 5.0, waits=False)
    traffic.adopt(Request(id=1, kind="new", prompt=8, generated=0), 5.0, waits=True)
    assert traffic.seen(6.0)["new"] == ClassEstimate(0.0, 8.0, 1.0, 0.0)


def test_hits_are_a_share_of_the_prompts_that_ended():
    traffic = TrafficEstimator({"a": ClassEstimate(1.0, 100.0, 10.0, 0.0, cached=50.0)}, half_life=5.0)
    assert traffic.seen(0.0)["a"].cached == pytest.approx(50.0)
    for id in range(400):
        one = Request(id=id, kind="a", prompt=200, generated=10, cached=150)
        traffic.arrived(one, id / 4)
        traffic.started(one, id / 4)
        traffic.finished(one, id / 4)
    seen = traffic.seen(100.0)["a"]
    assert (seen.prompt, seen.cached, seen.computed) == pytest.approx((200.0, 150.0, 50.0), rel=1e-3)
