"""Routers that know prefixes: seconds saved against seconds waited, its own and those of others."""

from __future__ import annotations

import pytest

from headgate.core.errors import InputError
from headgate.core.fleet import Move, endless
from headgate.core.ledger import Entry, Ledger
from headgate.core.roster import Roster
from headgate.core.view import Limits
from headgate.experiment.fleet import FleetSetup
from headgate.methods.balance.balance import Affinity
from headgate.methods.balance.prefix import Overlap, PrefixAware, Scored
from headgate.methods.balance.prefix_index import PrefixIndex, Sharing
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Contents, Workload
from worlds import Line

PRICE = Line(fixed=0.0, prefill=1.0, behind=0.0)  # a second a token
LEDGER = Ledger(Limits(64, 8, 16), 1000)


def request(id, prompt):
    return Entry(LEDGER, id, 0.0, prompt, 10)


class Front:
    """A router before two engines that take all they are sent."""

    def __init__(self, contents, make=PrefixAware, memory=10_000, cost=PRICE, **more):
        sharing = Sharing(lambda request: contents.get(request.id), cost, memory, 16)
        self.router = make(2, lambda: 0.0, sharing, **more)
        self.roster = Roster(("any", "any"), endless, ("",))

    def send(self, one, now=0.0):
        """Where it goes."""
        self.roster.now = now
        self.router.arrived(one, now)
        (move,) = self.router.route(self.roster).moves
        self.router.moved(one, move, now)
        return move.replica


def test_a_prefix_is_worth_the_seconds_it_saves():
    front = Front({n: [(1, 64), (10 + n, 36)] for n in range(9)})
    for id in range(4):
        one = request(id, 100)
        assert front.send(one) == 0  # nobody waits: the one that has the prefix
        front.router.lift(one)  # and it is gone at once
    assert front.send(request(4, 100)) == 0  # 36 s there, 100 s on engine 1
    assert front.send(request(5, 100)) == 1  # 36 s wait, and 36 s twice as one is stalled: 108 s; 100 s


def test_a_long_prompt_keeps_away_from_many_decodes():
    """It would stall each of them for as long as it takes, whatever waits there."""
    decoding = [request(n, 10) for n in range(3)]
    front = Front({9: [(1, 160)], 10: [(1, 160)]})
    front.router.moved(first := request(9, 160), Move(9, 0), 0.0)
    front.router.prefilled(first, 0, 0.0)
    for one in decoding:
        front.router.moved(one, Move(one.id, 0), 0.0)
        front.router.prefilled(one, 0, 0.0)
    assert front.router.cached(request(10, 160), [(1, 160)], 0) == 144
    assert front.send(request(10, 160)) == 0  # 16 s for itself and four others, 160 s on engine 1
    assert front.send(request(11, 100)) == 1  # nothing is cached: it stalls six there, none on engine 1


def test_its_own_decode_slows_others_by_what_the_card_says():
    card = Line(fixed=1.0, decode=0.5, prefill=0.0, context=0.0, behind=0.0)
    front = Front({}, cost=card)
    front.router._outputs[""] = 100, 1
    assert front.router.cost(request(0, 10), 0, 0) == pytest.approx(1.0 + 100 * 1.5)  # alone: 1 + 0.5 a step
    assert front.send(request(0, 10)) == 0
    # waits 1 s; its own prompt 1 s for two; 100 steps: 2 x 2 s together, 1.5 s without it
    assert front.router.cost(request(1, 10), 0, 0) == pytest.approx(1.0 + 2 * 1.0 + 100 * (4.0 - 1.5))


def test_a_prefill_stalls_no_more_than_can_run_at_once():
    router = Front({}, memory=1000).router
    backlog = router.backlogs[0]
    backlog.context = 4000
    assert router._decoding(backlog, 0, 100.0) == 0
    assert router._decoding(backlog, 20, 100.0) == 4  # 200 tokens and half an output each
    assert router._decoding(backlog, 20_000, 0.0) == 255  # all slots but its own


def test_outputs_are_learned_by_class():
    front = Front({})
    done = request(0, 10)
    done.kind = "agent"
    front.send(done)
    done._tokens = 40
    front.router.finished(done, 0, 1.0)
    other = request(1, 10)
    assert front.router._output(other) == 0.0
    other.kind = "agent"
    assert front.router._output(other) == done.generated == 40
    other.guess = 7
    assert front.router._output(other) == 7


def test_work_that_is_done_waits_no_more():
    front = Front({0: [(1, 100)]})
    front.send(one := request(0, 100))
    backlog = front.router.backlogs[0]
    assert (backlog.waits, backlog.left(0.0), backlog.left(30.0), backlog.left(1e9)) == (100, 100, 70, 0)
    front.router.prefilled(one, 0, 1.0)
    assert backlog.waits == 0.0 and backlog.context == 100
    front.router.finished(one, 0, 2.0)
    assert backlog.context == 0 and front.router.loads.total == 0


def test_a_request_sent_elsewhere_is_work_there():
    front = Front({0: [(1, 96)], 1: [(1, 96)]})
    one = request(0, 96)
    front.router.arrived(one, 0.0)
    front.router.route(front.roster)
    front.router.moved(one, Move(0, 1), 0.0)
    assert [front.router.backlogs[engine].waits for engine in (0, 1)] == [0.0, 96.0]
    assert front.router.cached(request(1, 96), [(1, 96)], 1) == 80


def test_an_engine_that_was_closed_has_lost_its_kv():
    front = Front({0: [(1, 96)], 1: [(1, 96)]})
    front.send(request(0, 96))
    front.roster.set_room(0, front.roster.member(0).room._replace(prompts=0, decodes=0, total=0))
    front.router.engines_changed(front.roster)
    assert front.router.cached(request(1, 96), [(1, 96)], 0) == 0


def test_without_contents_or_prices_it_is_the_fewest_tokens():
    front = Front({}, cost=None)
    assert [front.send(request(id, prompt)) for id, prompt in enumerate([100, 30, 30])] == [0, 1, 1]


def test_overlap_counts_blocks_in_use_too():
    front = Front({n: [(1, 160)] for n in range(9)}, Overlap)
    first = request(0, 160)
    assert front.send(first) == 0
    assert (
        front.router.cost(request(1, 160), 0, 144) == 10 + 1 + 10 + 10
    )  # to compute and in use, and its own
    front.router.prefilled(first, 0, 1.0)
    assert front.router.cost(request(1, 160), 0, 144) == 1 + 10 + 10
    assert front.send(request(1, 160)) == 1  # 10 + 10 there
    with pytest.raises(InputError, match="weight=-1 is below 0"):
        Front({}, Overlap, weight=-1)


class Reported:
    """What an engine says of itself."""

    def __init__(self, waiting, kv_free):
        self.waiting, self.kv_free = waiting, kv_free


def test_llm_d_adds_three_weighted_scores():
    front = Front({n: [(1, 160)] for n in range(9)}, Scored, memory=1000)
    slots = front.roster.replicas
    slots[0].inside, slots[1].inside = Reported(4, 250), Reported(0, 1000)
    assert front.send(request(0, 160)) == 1
    assert front.router.cost(request(1, 160), 1, 144) == -(3 * 0.9 + 2 * 1.0 + 2 * 1.0)
    assert front.router.cost(request(1, 160), 0, 0) == -(3 * 0 + 2 * 0.25 + 2 * 0.0)
    slots[1].inside = Reported(4, 250)
    assert front.send(request(1, 160)) == 1  # queues are equal: both score 1, the prefix decides
    assert front.router.cost(request(1, 32_768), 1, 16_384) == -(3 * 1.0 + 2 * 0.25 + 2 * 1.0)


def test_sessions_keep_to_one_engine_until_it_is_too_full():
    sessions = {n: n % 12 for n in range(300)}
    sharing = Sharing(lambda request: None, None, 1, 1, session=lambda request: sessions.get(request.id))
    router = Affinity(8, sharing)
    homes: dict[int, set[int]] = {}
    for id in range(24):
        homes.setdefault(sessions[id], set()).add(router.choose(request(id, 10)))
    assert all(len(engines) == 1 for engines in homes.values()) and len(set.union(*homes.values())) > 1
    for id in range(300):
        router.arrived(request(id, 10), 0.0)
    assert max(router.loads.load) <= 1.25 * 301 / 8 + 1


def test_an_index_forgets_what_was_sent_first():
    index = PrefixIndex(kv_tokens=64, block=16)
    for key in (1, 2, 3):
        index.sent([(key, 32)], 32)
    assert [index.cached([(key, 33)], 33) for key in (1, 2, 3)] == [0, 32, 32]
    index.sent([(9, 640)], 640)  # more than an engine holds
    assert index.cached([(9, 640)], 640) == 0


def test_an_index_forgets_what_was_not_used_for_long():
    index = PrefixIndex(kv_tokens=640, block=16, ttl=10.0)
    index.sent([(1, 64)], 64, now=0.0)
    index.sent([(2, 64)], 64, now=5.0)
    index.sent([(1, 32), (3, 32)], 64, now=5.0)  # not the same content: a piece ends elsewhere
    index.sent([(1, 40)], 40, now=8.0)  # two blocks of the first are used again
    assert index.cached([(1, 64)], 64, now=9.0) == 48
    assert index.cached([(1, 64)], 64, now=12.0) == 32  # those that were not used since 0
    assert index.cached([(2, 64)], 64, now=16.0) == 0
    assert index.cached([(1, 64)], 64, now=17.0) == 32
    assert index.cached([(1, 64)], 64, now=19.0) == 0
    assert index._pool.blank == index._pool.free == index._pool.total


def test_a_fleet_keeps_conversations_where_their_kv_is():
    rows = [[(talk, 64 + 32 * turn)] for turn in range(8) for talk in range(7)]
    prompts = [row[0][1] for row in rows]
    times = [40.0 * place for place in range(len(rows))]
    workload = Workload.of(prompts, [16] * len(rows), arrival=times, contents=Contents.of(rows))
    setup = FleetSetup(Engine(Line(), 1600, 1000, 256, 4, 16), 3)
    hits = {}
    for name, more in [("round-robin", {}), ("prefix-aware", {}), ("prefix-aware", {"exact": True}),
                       ("llm-d", {}), ("affinity", {})]:  # fmt: skip
        made, _ = setup.router(name, more, workload)
        run = setup.run(lambda role: Mixed(slots=4, budget=256), made, workload)
        hits[(name, *more)] = int(run.requests["cached"].sum())
    assert hits["prefix-aware",] > hits["round-robin",] > 0
    assert hits["prefix-aware", "exact"] >= hits["prefix-aware",]
    assert hits["llm-d",] > hits["round-robin",] < hits["affinity",]
