from headgate.live.route.answers import RefusedError, answer, error_event
from headgate.live.route.body_bytes import BodyBytes
from headgate.live.route.breaker import Breaker, State
from headgate.live.route.retries import FLOOR, RetryBudget, backoff


def test_five_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    for _ in range(4):
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(4):
        breaker.failed(1.0)
    assert breaker.state is State.CLOSED
    breaker.failed(2.0)
    assert breaker.state is State.OPEN
    assert breaker.allows(11.9) == 0
    assert breaker.reopens_at == 12.0


def test_half_of_the_last_twenty_open_it() -> None:
    breaker = Breaker()
    for turn in range(20):
        assert breaker.state is State.CLOSED
        if turn % 2:
            breaker.failed(0.0)
        else:
            breaker.succeeded()
    assert breaker.state is State.OPEN


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
    assert breaker.state is State.HALF_OPEN
    breaker.sent()
    breaker.succeeded()
    assert breaker.state is State.CLOSED
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
    assert held.take(6)
    assert not held.take(5)
    held.give_back(6)
    assert held.take(10)


def test_error_bodies() -> None:
    made = answer(RefusedError(429, "queue", "later", 7))
    assert made.headers["Retry-After"] == "7"
    assert b'"type": "rate_limit_error"' in made.body
    assert error_event(502, 'a"\n\nb').count(b"\n\n") == 1
    assert error_event(502, "x", torn=True).startswith(b"\n\ndata: ")
