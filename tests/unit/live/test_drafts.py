"""Drafts in the neutral half of the plug-in: what is counted, written down and told to policies."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from headgate.cli.report import notes
from headgate.core.errors import InputError
from headgate.core.ledger import Entry
from headgate.core.plan import ALL, Plan, Until
from headgate.core.policy import End, Observer, Steps
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.live.calibrate.steps import _TraceSteps
from headgate.live.engine.events import PromptPiece
from headgate.live.engine.live import Live
from headgate.live.engine.metrics import Metrics
from headgate.live.engine.plug_in import EngineFacts, PlugIn
from headgate.live.engine.settings import Settings
from headgate.live.engine.tally import DELIVERIES, Drafts, Tally
from headgate.live.engine.trace import Trace
from headgate.live.vllm import VLLM
from headgate.live.vllm.seams import lockstep
from headgate.methods.mixed.mixed import Mixed
from headgate.record.live_trace import read_live_trace
from headgate.stats.gaps import Gaps
from headgate_papers.wait.lookahead import LookAhead
from stub_scheduler import plug_in

WIDTH = 4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Held(Observer):
    def __init__(self) -> None:
        self.ids: list[int] = []

    def held(self, request, now) -> None:
        self.ids.append(request.id)


class Speculating:
    """A live engine whose decodes bring three drafts each; asynchronous: a step is composed ahead."""

    def __init__(self, *observers: Observer, count: int = 2, limit: int = 10) -> None:
        self.clock = Clock()
        self.live = Live(Mixed(8, 64), Limits(64, 8, 16, WIDTH), 1000, observers, clock=self.clock)
        self.entries = [
            Entry(self.live.ledger, number, 0.0, 5, limit, "chat" if number else "", None, 0, Slo())
            for number in range(count)
        ]
        for entry in self.entries:
            self.live.arrive(entry)
        self.live.begin(1000)
        for entry in self.entries:
            self.live.admitted(entry, 0)
        pieces = tuple(PromptPiece(entry, 5, 0, 0) for entry in self.entries)
        self.flights = [self.live.ran(pieces, 0, None)]

    def compose(self, *drafts: int) -> None:
        """A step with every decode that still needs tokens, each with so many drafts."""
        self.live.begin(1000)
        ids = [entry.id for entry in self.entries if entry.rolls]
        queries = len(ids) + sum(drafts[: len(ids)])
        strays = len(self.live.ledger.held) > 0 or len(ids) != self.live.ledger.rolling
        self.flights.append(self.live.ran((), len(ids), ids if strays else None, queries))

    def end(self, *tokens: int) -> None:
        """The oldest step ends; each entry now has so many tokens in all."""
        self.clock.now += 0.5
        self.live.done(self.flights.pop(0), 100)
        for entry, count in zip(self.entries, tokens, strict=True):
            self.live.recount(entry, count)


def test_tokens_per_step_is_measured_by_class_and_forgets():
    drafts = Drafts()
    assert drafts.tokens_per_step == 1.0
    drafts.saw([("", 1, 3), ("chat", 4, 3), ("chat", 2, 3), ("", 0, 3)])  # the last had gone
    assert drafts.tokens_per_step == pytest.approx(7 / 3)
    chat, plain = drafts.by_class["chat"], drafts.by_class[""]
    assert (chat.drafted, chat.accepted, chat.tokens_per_step) == (6, 4, 3.0)
    assert (plain.drafted, plain.accepted, plain.tokens_per_step) == (3, 0, 1.0)
    for _ in range(int(DELIVERIES)):
        drafts.saw([("chat", 1, 0)] * 10)  # later ones without drafts
    assert chat.tokens_per_step == pytest.approx(1.0, abs=1e-3) and chat.drafted == 6


def test_policies_are_told_when_it_has_changed():
    live = Speculating().live
    before = live.ledger.limits
    assert before.tokens_per_step == 1.0
    live.delivered([("", 3, 3), ("", 2, 3)])
    assert live.ledger.limits == before._replace(tokens_per_step=2.5)
    known = live.ledger.limits
    live.delivered([("", 5, 4), *[("", 2, 3), ("", 3, 3)] * 50])
    assert live.ledger.limits is known  # by less than a hundredth


def test_a_request_that_ends_early_with_its_drafts_is_not_taken_for_a_held_one():
    """The engine composes no step for one whose last token is in flight, and neither does the ledger."""
    held = Held()
    engine = Speculating(held)
    engine.compose(3, 3)
    engine.end(1, 1)  # the prompts: a token each
    engine.compose(3, 3)
    engine.end(5, 2)  # four tokens, and one
    engine.compose(3, 3)
    engine.end(9, 3)  # of 10: the step in flight brings its last, whatever is accepted
    engine.compose(3)
    first, second = engine.entries
    assert not first.rolls and second.rolls and not held.ids
    assert engine.live.ledger.rolling == 1 and engine.live.fallen is None
    engine.end(10, 4)
    assert (first.generated, second.generated) == (10, 4)


def test_steps_tell_the_tokens_of_their_decodes():
    seen: list[Steps] = []

    class Hears(Observer):
        def stepped(self, steps: Steps) -> None:
            seen.append(steps)

    engine = Speculating(Hears())
    for drafts, tokens in (((3, 3), (1, 1)), ((3, 3), (2, 2)), ((3, 0), (3, 3)), ((0, 0), (4, 4))):
        engine.compose(*drafts)
        engine.end(*tokens)
    engine.live.news.tell()
    decodes = [(steps.queries, len(steps.ends)) for steps in seen if steps.decodes]
    assert decodes == [(8, 2), (5, 1)]  # equal ones together; the last is in flight
    tally = Tally()
    for steps in seen:
        tally.stepped(steps)
    assert tally.tokens["decode"] == 21 and tally.steps["decode"] == 3


def test_what_vllm_will_take_of_a_decode():
    due = plug_in().knobs._tokens_due

    def request(**words):
        known = {"num_prompt_tokens": 10, "num_tokens": 15, "num_computed_tokens": 14, "max_tokens": 20}
        return SimpleNamespace(**known | {"num_output_placeholders": 0, "spec_token_ids": []} | words)

    assert due(request()) == 1
    assert due(request(spec_token_ids=[7, 8, 9])) == 4
    # A step with three drafts in flight: 4 placeholders, all counted as computed.
    assert due(request(num_computed_tokens=18, num_output_placeholders=4, spec_token_ids=[-1] * 3)) == 4
    assert due(request(num_computed_tokens=18, num_output_placeholders=4)) == 1  # its drafts were lost
    last = {"num_tokens": 29, "num_computed_tokens": 32, "num_output_placeholders": 4}
    assert due(request(**last, spec_token_ids=[-1] * 3)) == 0  # 19 of 20, and one is on its way
    assert due(request(**last | {"max_tokens": 21})) == 1


def test_metrics_show_drafts_by_class():
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    about = {"policy": "eb", "card": "none", "model": "m"}
    metrics = Metrics(Settings(), about, 100, registry=registry, background=False)
    metrics.show()
    shown = prometheus.generate_latest(registry).decode()
    assert "headgate_tokens_per_step{" not in shown and "tokens per decode" not in metrics.line(
        1.0, metrics.all_steps()
    )
    metrics.drafts.saw([("", 3, 3), ("chat", 1, 3)])
    metrics.show()
    engine = {"engine": "0"}
    assert registry.get_sample_value("headgate_tokens_per_step", engine | {"class": "default"}) == 3.0
    assert (
        registry.get_sample_value("headgate_drafts_total", engine | {"class": "default", "accepted": "true"})
        == 2
    )
    assert (
        registry.get_sample_value("headgate_drafts_total", engine | {"class": "chat", "accepted": "false"})
        == 3
    )
    assert "2.00 tokens per decode and step" in metrics.line(1.0, metrics.all_steps())
    metrics.close()


@pytest.fixture
def traced(tmp_path):
    """A trace of two decodes with drafts: gaps of half a second, 2 and 6 tokens in two deliveries each."""

    def write(queries: int):
        path = tmp_path / f"{queries}.jsonl"
        trace = Trace(path, {"policy": "mixed", "kv_tokens": 100}, background=False)
        engine = Speculating(trace)
        engine.compose(*[queries] * 2)
        engine.end(1, 1)
        engine.compose(*[queries] * 2)
        engine.end(2, 4)
        engine.live.begin(1000)
        engine.end(3, 7)
        for entry in engine.entries:
            engine.live.left(entry, End.STOPPED)
        trace.close()
        return path

    return write


def test_the_trace_has_query_tokens_and_gaps_are_between_deliveries(traced):
    path = traced(3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line.get("event") == "steps"]
    assert [(line.get("queries"), len(line["ends"])) for line in steps] == [(None, 1), (8, 2)]
    run = read_live_trace(path)
    assert run.steps["queries"].tolist() == [0, 8]
    assert run.requests["output"].tolist() == [3, 7]
    assert [len(gaps) for gaps in Gaps(run).lists()] == [2, 2]  # not 2 and 6
    assert run.meta["speculation"] == {"drafts": None}  # its header does not say
    assert any("computed 4.00 tokens in a step, drafts included, and got 2.00" in note for note in notes(run))
    told = _TraceSteps()
    for line in lines[1:]:
        told.tell(line | {"queries": line.get("queries", 0)})
    told.settle()
    assert [row["queries"] for row in told.rows] == [0, 8, 8]


def test_without_drafts_the_trace_is_as_it_was(tmp_path):
    path = tmp_path / "t.jsonl"
    trace = Trace(path, {"policy": "mixed"}, background=False)
    trace.stepped(Steps(0.0, [0.5], 3, 30, 0, 0, 100))
    trace.close()
    step = json.loads(path.read_text().splitlines()[1])
    assert [*step] == ["event", "start", "ends", "decodes", "context", "prefill", "behind", "kv"]


# -- ranks that step together

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
RANKS = EngineFacts(VLLM, "0.32.0", "org/experts", 1000, LIMITS, lockstep=8)


def build(settings):
    return None, {}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"tbt": "100ms"}, "tbt: 8 data-parallel ranks"),
        ({"classes": {"chat": {"tbt": "50ms"}}}, "tbt of class chat: 8"),
        ({"clients_may": ["class", "tbt"]}, "clients_may"),
        ({"policy": "keep:tbt=0.1"}, "tbt of policy keep: 8"),
    ],
)
def test_gap_promises_are_refused_unless_insisted_on(words, named, caplog):
    settings = Settings(**{"policy": "keep", "metrics": False} | words)
    with pytest.raises(InputError, match=named):
        PlugIn(settings, RANKS, build)
    PlugIn(settings, RANKS._replace(lockstep=1), build).close()
    PlugIn(settings.model_copy(update={"lockstep": True}), RANKS, build).close()
    watching = PlugIn(Settings(metrics=False, policy="vllm", tbt="100ms"), RANKS, build)  # decides nothing
    with pytest.raises(InputError, match="drop it, or set lockstep"):
        watching._prepare(settings)  # nor may a file that is read again
    watching.close()


def test_the_trace_says_that_ranks_stepped_together(tmp_path, caplog):
    path = tmp_path / "t.jsonl"
    plug = PlugIn(Settings(policy="mixed", metrics=False, ttft="1s", trace=str(path)), RANKS, build)
    plug.begin(Live(None, Limits(64, 8), 1000, clock=lambda: 0.0))
    plug.close()
    assert json.loads(path.read_text().splitlines()[0])["lockstep"] == 8
    assert "8 data-parallel ranks step together" in caplog.text
    meta = {"outcome": "finished", "policies": [], "fallbacks": [], "lockstep": 8}
    assert notes(SimpleNamespace(meta=meta, steps={}, kinds=())) == [
        "8 data-parallel ranks stepped together: prompts of any lengthen gaps of all"
    ]


@pytest.mark.parametrize(
    ("parallel", "model", "ranks"),
    [
        ({"data_parallel_size": 8, "is_moe_model": True}, {}, 8),
        ({"data_parallel_size": 8, "is_moe_model": None}, {"is_moe": True}, 8),
        ({"data_parallel_size": 8}, {"is_moe": True}, 8),
        ({"data_parallel_size": 8, "is_moe_model": False}, {"is_moe": True}, 1),
        ({"data_parallel_size": 8}, {}, 1),
        ({"data_parallel_size": 1, "is_moe_model": True}, {}, 1),
        ({}, {"is_moe": True}, 1),
    ],
)
def test_which_engines_step_together(parallel, model, ranks):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), model_config=SimpleNamespace(**model)
    )
    assert lockstep(config) == ranks


def test_a_plan_of_many_steps_is_in_steps():
    """Look-ahead forecasts in tokens; decodes that get two in a step are there in half the time."""

    def wait(tokens_per_step: float) -> float:
        live = Live(None, Limits(64, 8, 1, WIDTH, tokens_per_step), 60, clock=lambda: 0.0)
        ledger = live.ledger
        for number, prompt in enumerate((20, 30)):
            ledger.arrive(Entry(ledger, number, 0.0, prompt, 40, "", 21))
        entry = ledger.waiting[0]
        ledger.admit(entry)
        ledger.join(entry, 0.0, True)
        plan = LookAhead(8, 64).plan(ledger)
        assert plan == Plan(ALL, until=Until(steps=plan.until.steps, finishes=1))
        return plan.until.steps

    assert wait(1.0) == 2 * wait(2.0) and np.isfinite(wait(1.0))
