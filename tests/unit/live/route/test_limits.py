from headgate.live.route.config import client_at
from headgate.live.route.deliver.legs import FLOOR, RetryBudget, backoff
from headgate.live.route.engines import Breaker, BreakerState
from headgate.live.route.request import BodyBytes, RefusedError, Shares, answer, error_event


def test_five_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    for _ in range(4):
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(4):
        breaker.failed(1.0)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed(2.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.allows(11.9) == 0
    assert breaker.reopens_at == 12.0


def test_half_of_the_last_twenty_open_it() -> None:
    breaker = Breaker()
    for turn in range(20):
        assert breaker.state is BreakerState.CLOSED
        if turn % 2:
            breaker.failed(0.0)
        else:
            breaker.succeeded()
    assert breaker.state is BreakerState.OPEN


def test_one_probe_at_a_time_and_two_successes_close_it() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.failed(0.0)
    assert breaker.allows(10.0) == 1
    breaker.sent()
    assert breaker.allows(10.0) == 0
    breaker.gone()  # the client of the probe hung up
    assert breaker.allows(10.0) == 1
    breaker.sent()
    breaker.succeeded()
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.sent()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows(10.0) is None


def test_pauses_double_to_two_minutes() -> None:
    breaker, now, pauses = Breaker(), 0.0, []
    for _ in range(5):
        breaker.failed(now)
    for _ in range(6):
        until = breaker.reopens_at
        assert until is not None
        pauses.append(until - now)
        now = until
        assert breaker.allows(now) == 1
        breaker.sent()
        breaker.failed(now)
    assert pauses == [10, 20, 40, 80, 120, 120]
    assert breaker.opened == 7


def test_retry_budget_is_a_share_of_the_last_minute() -> None:
    budget = RetryBudget(0.2)
    for turn in range(1000):
        budget.arrived(turn * 0.05)
    assert sum(budget.take(50.0) for _ in range(500)) == 200
    assert budget.denied == 300
    assert budget.take(1000.0)  # the floor, long after
    assert sum(budget.take(1000.0) for _ in range(50)) == FLOOR - 1
    assert not RetryBudget(0.0).take(0.0)


def test_backoff() -> None:
    assert [backoff(n, lambda: 1.0) for n in (1, 2, 3)] == [0.05, 0.1, 0.2]
    assert backoff(1, lambda: 0.0) == 0.025
    assert backoff(40, lambda: 1.0) == 1.0


def test_bytes() -> None:
    held = BodyBytes(10)
    assert held.take("a", 6)
    assert not held.take("a", 5)
    held.give_back("a", 6)
    assert held.take("a", 10)


def test_one_client_alone_gets_eight_ninths_and_others_always_find_some() -> None:
    made = Shares(900)
    assert sum(made.take("greedy") for _ in range(2000)) == 800
    assert made.take("other")
    taken = [sum(made.take(f"{number}") for _ in range(2000)) for number in range(9)]
    assert all(each >= 1 for each in taken[:3]) and taken == sorted(taken, reverse=True)
    assert made.held <= 900 and made.fits("new") == (made.held < 900)
    for _ in range(800):
        made.give_back("greedy")
    assert made.take("late", 300)


def test_of_few_one_is_left_for_others_and_one_alone_may_be_taken() -> None:
    assert Shares(1).take("a")
    for most in range(2, 10):
        made = Shares(most)
        assert sum(made.take("greedy") for _ in range(20)) == most - 1
        assert made.take("other") and not made.take("third")


def test_an_answer_counts_to_the_client_that_does_not_read_it() -> None:
    held = BodyBytes(90)
    with held.answer("slow", b"x" * 80) as fits:
        assert fits
        assert not held.take("slow", 1)
        assert held.take("other", 5)
        with held.answer("slow", b"x" * 80) as fits_too:
            assert not fits_too
    assert held.held == 5 and held._of == {"other": 5}


def test_a_share_has_a_bound_of_its_own_where_one_is_set_and_nothing_is_kept_of_clients_that_left() -> None:
    made = Shares(100, each=2)
    assert [made.take("a") for _ in range(3)] == [True, True, False]
    assert made.take("b")
    for client in "aab":
        made.give_back(client)
    assert made.held == 0 and made._of == {}


def test_a_client_of_ipv6_is_its_network() -> None:
    assert client_at(("10.0.0.7", 5)) == "10.0.0.7"
    assert client_at(("::ffff:10.0.0.7", 5, 0, 0)) == "10.0.0.7"
    assert client_at(("2001:db8::1", 5, 0, 0)) == client_at(("2001:db8::ffff:2%eth0", 6, 0, 0))
    assert client_at(("2001:db8:0:1::1", 5, 0, 0)) == client_at(("2001:db8::1", 5, 0, 0))
    assert client_at(("2001:db8:1::1", 5, 0, 0)) != client_at(("2001:db8::1", 5, 0, 0))
    assert client_at(None) == ""


def test_error_bodies() -> None:
    _, headers, body = answer(RefusedError(429, "queue", "later", 7), "/v1/completions")
    assert headers["Retry-After"] == "7"
    assert b'"type": "rate_limit_error"' in body
    assert error_event(502, 'a"\n\nb').count(b"\n\n") == 1
    assert error_event(502, "x", torn=True).startswith(b"\n\ndata: ")
