"""The stochastic network against answers from queueing theory, an exact Markov chain, and its own books."""

from math import inf

import numpy as np
import pytest

from fleet_worlds import Listed, Watched, draws, make_router
from fluid_worlds import CODE, SUMMARY, instance
from headgate.core.errors import InputError, RunError
from headgate.core.fleet import Move, RoutePolicy, Routing, Stage
from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.planner import plan_fluid
from headgate.workloads.streams import uniforms
from headgate_papers.network.counts import HANDOFF, LEVELS, MIXED, PREFILLING, SOLO, WAITING
from headgate_papers.network.network import Network
from headgate_papers.network.source import Poisson

PRICES = TokenPrices(0.1, 0.2)


def network(start: Instance, engines: int, router: str = "fi-wsp", seed: int = 0, law: str = "exponential"):
    made = make_router(router, plan_fluid(start), engines, draws(seed))
    return Network(start, engines, made, Poisson(start, engines, seed, law))


def erlang_a(rate: float, service: float, servers: int, impatience: float) -> tuple[float, float]:
    """Mean number waiting and busy of M/M/n+M, from its birth and death rates."""
    weights = [1.0]
    for state in range(1, 2000):
        out = min(state, servers) * service + max(0, state - servers) * impatience
        weights.append(weights[-1] * rate / out)
        if weights[-1] < 1e-15 * max(weights) and state > servers:
            break
    states, share = np.arange(len(weights)), np.array(weights) / sum(weights)
    return float(share @ np.maximum(0, states - servers)), float(share @ np.minimum(states, servers))


def test_prefill_alone_is_erlang_a():
    """Outputs of next to nothing: six engines are six servers with impatient customers."""
    pace = EnginePace(4, 100, 0.1, 0.004, 50.0)  # a mixed step of 0.5 s: prompts of 200 tokens take a second
    start = Instance((Flow("a", 200.0, 1e-3, 1.1, 0.4),), pace, PRICES)
    windows = [network(start, 6, seed=seed).windows(2000.0, [100.0])[0] for seed in range(4)]
    waiting, busy = erlang_a(6.6, 1.0, 6, 0.4)
    found = [float(np.mean([window.mean(level)[0] for window in windows])) for level in (WAITING, PREFILLING)]
    assert 6 * found[0] == pytest.approx(waiting, rel=0.05)
    assert 6 * found[1] == pytest.approx(busy, rel=0.01)
    assert np.mean([window.rate("gave_up")[0] for window in windows]) == pytest.approx(
        0.4 * found[0], rel=0.05
    )


def chain(rate: float, prefill: float, mixed: float, solo: float, impatience: float, most: int = 80):
    """One engine with two slots under FI-WSP, solved exactly: (waiting, prompt in service, decodes)."""
    states = [(q, p, d) for q in range(most) for p in (0, 1) for d in range(3) if p + d <= 2]
    states = [(q, p, d) for q, p, d in states if not (q and p == 0 and d < 2)]  # prompts start at once
    place = {state: number for number, state in enumerate(states)}

    def settle(q: int, p: int, d: int) -> tuple[int, int, int]:
        return (q - 1, 1, d) if q and p == 0 and d < 2 else (q, p, d)

    flow = np.zeros((len(states), len(states)))
    for (q, p, d), here in place.items():
        steps = [(rate, settle(min(q + 1, most - 1), p, d)), (q * impatience, settle(max(q - 1, 0), p, d))]
        steps.append((p * prefill, settle(q, 0, d + 1) if p else (q, p, d)))
        steps.append((d * (mixed if p else solo), settle(q, p, max(d - 1, 0))))
        for speed, there in steps:
            if speed and place.get(there, here) != here:
                flow[here, place[there]] += speed
    np.fill_diagonal(flow, -flow.sum(axis=1))
    system = np.vstack([flow.T, np.ones(len(states))])
    share = np.linalg.lstsq(system, np.append(np.zeros(len(states)), 1.0), rcond=None)[0]
    means = share @ np.array(states, dtype=float)
    slow = share @ np.array([d if p else 0 for _, p, d in states], dtype=float)
    return means[0], means[1], slow, means[2] - slow


def test_one_engine_against_the_exact_chain():
    pace = EnginePace(2, 100, 0.1, 0.004, 5.0)  # mixed step 0.5 s (2 tokens/s), solo 5 tokens/s
    start = Instance((Flow("a", 100.0, 4.0, 0.8, 0.3),), pace, PRICES)
    exact = chain(0.8, 2.0, 0.5, 1.25, 0.3)
    window = network(start, 1, seed=1).windows(30_000.0, [100.0])[0]
    found = [window.mean(level)[0] for level in (WAITING, PREFILLING, MIXED, SOLO)]
    assert found == pytest.approx(exact, rel=0.04)  # 16 runs of twice that length: within 0.3 %
    assert window.served[0] == pytest.approx(0.5 * exact[2] + 1.25 * exact[3], rel=0.01)


def test_plenty_of_slots_is_littles_law():
    """Underload: every class is served in full, and decodes stand as long as their tokens take."""
    start = instance(0.1, 0.1)
    window = network(start, 10, "gate-and-route+").windows(3000.0, [200.0])[0]
    assert window.served == pytest.approx([0.1, 0.1], rel=0.05)
    tokens = window.mean(MIXED) / start.pace.mixed_step + window.mean(SOLO) * start.pace.solo_speed
    assert tokens == pytest.approx(window.served * np.array([1000, 400]), rel=0.05)
    assert window.revenue() == pytest.approx(plan_fluid(start).revenue, rel=0.05)
    assert window.revenue("separate") == pytest.approx(window.revenue(), rel=0.02)


def test_the_fluid_optimum_is_approached():
    """A1 at n = 40: about 3 % and 1 % below the optimum in a long run."""
    start = instance()
    best = plan_fluid(start).revenue
    literal, ours = (
        network(start, 40, name).windows(600.0, [200.0])[0].revenue()
        for name in ("gate-and-route", "gate-and-route+")
    )
    assert 0.94 * best < literal < ours < 1.01 * best


@pytest.mark.parametrize("router", ["gate-and-route", "fi-wsp", "gf-wsp", "service-level"])
def test_books_balance_and_pages_add_up(router):
    run = network(instance(1, 1), 5, router)
    pages = run.run(60.0, [0.0, 20.0, 40.0])
    run.books.check()
    assert [page.time for page in pages] == [0.0, 20.0, 40.0, 60.0]
    assert pages[0].counts["arrivals"].sum() == 0
    assert (pages[-1].spent >= pages[1].spent - 1e-9).all()
    assert pages[-1].levels.tolist() == run.books.levels
    slots = run.fleet.replicas
    assert sum(s.decodes for s in slots) == sum(map(sum, run.books.levels[MIXED : SOLO + 1]))
    assert len(run.fleet.handoff) == sum(run.books.levels[HANDOFF])


def test_marks_are_windows():
    windows = network(instance(), 5).windows(100.0, [50.0, 10.0])
    assert [(w.first.time, w.last.time) for w in windows] == [(10.0, 50.0), (50.0, 100.0)]
    whole = network(instance(), 5).windows(100.0, [10.0])[0]
    parts = sum(w.revenue() * w.seconds for w in windows)
    assert whole.revenue() * 90 == pytest.approx(parts)


def test_cooked_books_are_found():
    run = network(instance(), 3)
    run.run(5.0)
    run.books.counts["prompts_done"][0] += 1
    with pytest.raises(RunError, match="the books do not balance: prefilling"):
        run.books.check()


def test_one_request_by_hand():
    """Prefill 2 s at mixed speed for the other's decode, then both alone."""
    pace = EnginePace(2, 100, 0.1, 0.004, 5.0)
    start = Instance((Flow("a", 100.0, 10.0, 1.0),), pace, PRICES)
    rows = [(0.0, 0, 1.0, 10.0, inf, inf), (1.5, 0, 2.0, 5.0, inf, inf)]
    router = Watched(make_router("fi-wsp", plan_fluid(start), 1, draws(0)))
    run = Network(start, 1, router, Listed(*rows))
    run.run()
    times = {(what, id): now for what, now, id, *_ in router.log}
    assert times["prefilled", 0] == 1.0
    # 2.5 tokens alone to 1.5 s, 4 beside the prompt to 3.5 s, the other 3.5 alone in 0.7 s
    assert times["finished", 0] == pytest.approx(4.2)
    assert times["finished", 1] == pytest.approx(4.5)
    assert run.books.counts["to_mixed"] == [1] and run.books.counts["to_solo"] == [1]


def test_patience_ends_in_either_queue():
    pace = EnginePace(2, 100, 0.1, 0.004, 5.0)
    start = Instance((Flow("a", 100.0, 10.0, 1.0, 0.1),), pace, PRICES)
    rows = [
        (0.0, 0, 1.0, 50.0, inf, inf),  # decodes until 21
        (0.1, 0, 1.0, 50.0, 0.5, inf),  # gives up at 0.6
        (0.2, 0, 1.0, 50.0, inf, 3.0),  # prefilled at 2, drops at 5: the only decode slot is taken
    ]
    router = Watched(make_router("gate-and-route", plan_fluid(start), 1, draws(0)))
    run = Network(start, 1, router, Listed(*rows))
    run.run()
    left = {id: now for what, now, id, *_ in router.log if what == "left"}
    assert left == pytest.approx({1: 0.6, 2: 5.0})
    assert (run.books.counts["gave_up"], run.books.counts["dropped"]) == ([1], [1])


def test_every_router_meets_the_same_requests():
    start = instance()
    logs = []
    for name in ("fi-wsp", "gate-and-route+"):
        router = Watched(make_router(name, plan_fluid(start), 3, draws(0)))
        Network(start, 3, router, Poisson(start, 3, 7)).run(50.0)
        logs.append([row for row in router.log if row[0] == "arrived"])
    assert logs[0] == logs[1]


def test_a_class_without_arrivals_never_comes():
    start = instance(0.5, 0.0)
    run = network(start, 4)
    run.run(50.0)
    assert run.books.counts["arrivals"][1] == 0 < run.books.counts["arrivals"][0]


@pytest.mark.parametrize("law", ["exponential", "fixed", "lognormal"])
def test_laws_have_the_same_means(law):
    source = Poisson(instance(sizes=(CODE, SUMMARY)), 10, 0, law)
    blocks = [source.next_block() for _ in range(6)]
    kinds = np.concatenate([block.kind for block in blocks])
    outputs = np.concatenate([block.output for block in blocks])
    assert outputs[kinds == 0].mean() == pytest.approx(1000, rel=0.03)
    assert outputs[kinds == 1].mean() == pytest.approx(400, rel=0.03)
    assert np.mean(kinds == 0) == pytest.approx(0.5, abs=0.01)
    assert len(kinds) / blocks[-1].time[-1] == pytest.approx(10, rel=0.02)


def test_what_a_router_may_know_of_a_request():
    seen = []

    class Curious(RoutePolicy):
        def arrived(self, request, now):
            seen.append((request.prompt, request.todo, request.generated, request.last_token))

        def finished(self, request, replica, now):
            seen.append((request.todo, request.generated))

        def route(self, fleet):
            ids = list(fleet.queues["class0"])
            return Routing((Move(ids[0], 0),)) if ids and fleet.idle["any"] else Routing()

    Network(instance(1, sizes=(CODE,)), 1, Curious(), Listed((0.0, 0, 0.1, 25.0, inf, inf))).run()
    assert seen == [(300, 300, 0, None), (0, 25)]


class Stubborn(RoutePolicy):
    """Answers the same thing for ever."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing

    def route(self, fleet):
        return self.routing


@pytest.mark.parametrize(
    ("routing", "said"),
    [
        (Routing(), "Stubborn leaves 1 requests unserved"),
        (Routing((Move(0, 9),)), "there are 2 engines"),
        (Routing((Move(0, 0, Stage.DECODE),)), "request 0 does not wait for that"),
        (Routing((Move(0, 0), Move(0, 1))), "request 0 does not wait for that"),
        (Routing(reject=(4,)), "request 4 does not wait for its prompt"),
        (Routing(wake=0.0), "asks to be woken at 0.0"),
    ],
)
def test_nonsense_is_refused(routing, said):
    run = Network(instance(), 2, Stubborn(routing), Listed((0.0, 0, 1.0, 5.0, inf, inf)))
    with pytest.raises(RunError, match=said):
        run.run()


def test_impossible_fleets():
    router = make_router("fi-wsp", plan_fluid(instance()), 2, draws(0))
    with pytest.raises(InputError, match="0 engines"):
        Network(instance(), 0, router, Listed())
    with pytest.raises(InputError, match="1 slots per engine; give at least 2"):
        Network(instance(slots=1), 2, router, Listed())


def test_uniform_draws():
    draw = uniforms(np.random.Generator(np.random.PCG64(0)))
    values = [draw() for _ in range(20_000)]
    assert min(values) >= 0 and max(values) < 1
    assert np.mean(values) == pytest.approx(0.5, abs=0.02)
    assert LEVELS[WAITING] == "waiting" and LEVELS[SOLO] == "solo"
