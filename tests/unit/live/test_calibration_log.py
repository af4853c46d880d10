from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headgate.core.errors import InputError
from headgate.live.calibrate.campaign import Composition, StepLog, composition, drafting


def output(
    new: dict[str, tuple[int, int]] | None = None,
    old: dict[str, tuple[int, int, int]] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    """What vLLM's scheduler answers: name -> (tokens, computed), name -> (tokens, computed, put out)."""
    new, old = new or {}, old or {}
    tokens = {name: row[0] for name, row in {**new, **old}.items()}
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_new_reqs=[SimpleNamespace(req_id=n, num_computed_tokens=row[1]) for n, row in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(old),
            num_computed_tokens=[row[1] for row in old.values()],
            num_output_tokens=[row[2] for row in old.values()],
            resumed_req_ids={name for name in old if name.startswith("resumed")},
        ),
    )


DECODE = {"a": (1, 99, 5)}


class Scheduler:
    """Answers what it is told to, and may have somebody left."""

    def __init__(self) -> None:
        self.now, self.left = 0.0, True
        self.log = StepLog(self, clock=lambda: self.now)

    def schedule(self, answer: Any) -> Any:
        return answer

    def update_from_output(self, answer: Any) -> str:
        return "done"

    def has_unfinished_requests(self) -> bool:
        return self.left

    def compose(self, at: float, answer: Any) -> Any:
        self.now = at
        return self.schedule(answer)

    def end(self, at: float, answer: Any) -> None:
        self.now = at
        assert self.update_from_output(answer) == "done"

    def seconds(self) -> list[float]:
        return [pytest.approx(row.end - row.start) for row in self.log.rows]


def test_what_a_step_holds() -> None:
    old = {"decode": (1, 99, 5), "piece": (40, 60, 0), "last": (1, 30, 0), "resumed": (1, 10, 3)}
    held = composition(output({"fresh": (100, 0)}, old))
    pairs = 100 * 50 + 40 * (60 + 20) + 1 * 30.5 + 1 * 10.5
    assert held == Composition(1, 100, 142, 100, 4, pairs)


def test_decodes_with_drafts() -> None:
    """Four tokens are a decode with three drafts, or a piece of a prompt."""
    old = {"decode": (4, 99, 5), "cut": (2, 50, 3), "bare": (1, 9, 1), "piece": (4, 60, 0)}
    held = composition(output(old=old, drafts={"decode": [-1, -1, -1], "cut": [7]}))
    assert held == Composition(3, 161, 4, 60, 1, 4 * 62, 4)


def test_asynchronous_steps_end_one_after_the_other() -> None:
    """The second is composed while the first runs; it takes from the first one's end to its own."""
    engine = Scheduler()
    steps = [output(old=DECODE) for _ in range(3)]
    engine.compose(0.0, steps[0])
    engine.compose(0.1, steps[1])
    engine.end(1.0, steps[0])
    engine.compose(1.1, steps[2])
    engine.end(1.5, steps[1])
    engine.end(2.5, steps[2])
    assert engine.seconds() == [1.0, 0.5, 1.0]
    assert [row.ahead for row in engine.log.rows] == [False, True, True]
    assert [row.before for row in engine.log.rows] == [0, 1, 1]


def test_without_it_the_composing_is_part_of_a_step() -> None:
    engine = Scheduler()
    for at in (0.0, 1.0):
        step = output({"p": (50, 0)}) if not at else output(old=DECODE)
        engine.compose(at + 0.2, step)
        engine.end(at + 0.9, step)
    assert engine.seconds() == [0.7, 1.0]
    assert not any(row.ahead for row in engine.log.rows)
    assert [row.before for row in engine.log.rows] == [0, 2]


def test_an_idle_engine_takes_no_time() -> None:
    engine = Scheduler()
    first, second, third = (output(old=DECODE) for _ in range(3))
    engine.compose(0.0, first)
    engine.left = False
    engine.end(1.0, first)
    engine.left = True
    engine.compose(5.0, second)
    engine.end(5.5, second)
    nothing = output()
    engine.compose(5.6, nothing)
    engine.end(5.7, nothing)
    engine.compose(9.0, third)
    engine.end(9.25, third)
    assert engine.seconds() == [1.0, 0.5, 0.25]


def test_steps_around_a_disturbance_are_left_out() -> None:
    engine = Scheduler()
    steps = [output(old=DECODE) for _ in range(6)]
    engine.compose(0.0, steps[0])
    for number in range(1, 6):
        engine.compose(number - 0.5, steps[number])
        engine.end(float(number), steps[number - 1])
        if number == 2:
            engine.log.disturbed()
    engine.end(6.0, steps[5])
    assert [row.kept for row in engine.log.rows] == [True, True, False, False, False, True]
    assert len(engine.log.table()) == 3


def test_the_table_has_a_part_for_each_label() -> None:
    engine = Scheduler()
    names = iter(["fill", "cell", "fill"])
    engine.log.label = lambda: next(names)
    for at in (0.0, 1.0, 2.0):
        step = output(old=DECODE)
        engine.compose(at, step)
        engine.end(at + 0.5, step)
    table = engine.log.table()
    assert table.labels == ("fill", "cell")
    assert table.part.tolist() == [0, 1, 0]


def test_rows_say_when_a_step_was_composed() -> None:
    engine, step = Scheduler(), output(old=DECODE)
    engine.compose(1.0, step)
    engine.end(1.5, step)
    (row,) = engine.log.rows
    assert row.kept and (row.composed, row.start, row.end) == (1.0, 1.0, 1.5)
    assert (row.held.decodes, row.held.prefill) == (1, 0)


def test_drafts_are_rejected_unless_it_is_said_how_they_are_sampled() -> None:
    asked = {"method": "mtp", "num_speculative_tokens": 2}
    rejected = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0, 0.0]}
    assert drafting(asked) == asked | rejected
    own = asked | {"rejection_sample_method": "standard"}
    assert drafting(own) == own
    for wrong in (3, {"method": "mtp"}, {"num_speculative_tokens": "2"}):
        with pytest.raises(InputError, match="num_speculative_tokens, such as"):
            drafting(wrong)
