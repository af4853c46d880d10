"""The books of a trial agree with the tables of the same run, and find what is known to be there."""

from __future__ import annotations

from itertools import accumulate, islice
from types import SimpleNamespace

import numpy as np
import pytest

import headgate
from headgate.core.policy import End
from headgate.core.request import Slo
from headgate.live.trial.book import Block, Book, Listener, as_json, bench_result, by_round, judge
from headgate.stats.measured import Measured
from headgate.stats.switchback import (
    CANNOT_TELL,
    GAP_P99,
    KEPT,
    LESS,
    LIGHT,
    MORE,
    SAME,
    SATURATED,
    THROUGHPUT,
    TTFT,
    Looks,
    in_rounds,
)
from headgate.workloads.workload import Kind, Workload
from trial_worlds import book_of, closed_world, findings_of, open_world


def words(findings):
    return {verdict.metric.name: verdict.word for verdict in findings.found[0].verdicts}


@pytest.mark.parametrize("policy", ["mixed", "eb:refill=16", "slai"])
def test_the_books_agree_with_the_tables(policy):
    """Evictions, holds and shared ticks: every gap, first token and kept promise is the tables'."""
    rng = np.random.default_rng(3)
    kinds = Kind("chat", Slo(0.3, 0.04)), Kind("batch", Slo(2.0, None))
    arrival = np.sort(rng.uniform(0, 5, 300))
    world = Workload.of(
        prompt=rng.integers(10, 900, 300),
        output=rng.integers(1, 200, 300),
        arrival=arrival,
        kind=rng.integers(0, 2, 300),
        kinds=kinds,
    )
    engine = headgate.card_engine("cal-h200-qwen3-8b", slots=48, kv_tokens=12_000)
    book = Book()
    book.begin(0, 0, 0.0, 0.0)
    run = headgate.simulate(engine, policy, world, observers=(Listener(book),))
    book.end(1e9)
    tables = Measured(run)
    assert run.requests["evictions"].sum() > 0
    sums = book.blocks[0].sums()
    assert sums.requests == 300 and book.here == book.waiting == 0
    assert sums.kept == tables.promises.met.sum()
    assert sums.ttft == pytest.approx(np.nansum(tables.latencies.ttft))
    assert sums.tokens == run.requests["output"].sum()
    sample = tables.gaps.sample(np.ones(300, bool))
    assert sums.gaps == sample.weights.sum()
    assert sums.gap_seconds == pytest.approx((sample.values * sample.weights).sum())
    by_class = [book.blocks[0].sums(kind.name).kept for kind in kinds]
    kept = [tables.promises.met[run.requests["kind"] == place].sum() for place in (0, 1)]
    assert by_class == kept and 0 < by_class[0] < book.blocks[0].sums("chat").requests
    result = bench_result(book, 0, "x", "m", "", None)
    assert result["completed"] == 300 and result["total_output_tokens"] == sums.tokens
    assert result["mean_ttft_ms"] == pytest.approx(1000 * np.nanmean(tables.latencies.ttft))
    assert result["mean_itl_ms"] == pytest.approx(1000 * sums.gap_seconds / sums.gaps, rel=0.01)


def test_a_request_counts_where_it_arrives_and_a_gap_where_it_ends():
    book = Book({None: Slo(1.0, 0.5)})
    first = book.begin(0, 0, 0.0, burn=2.0)
    ignored = book.arrived(1.0, "")  # burn-in
    seen = book.arrived(9.0, "", prompt=7)
    book.first_token(seen, 9.5)
    second = book.begin(1, 0, 10.0, burn=2.0)
    book.next_token(seen, 10.0)  # burn-in of the next block
    book.next_token(seen, 13.0)
    book.left(seen, 13.0, True, 3)
    book.left(ignored, 13.0, True, 3)
    assert first.sums().requests == 1 and first.sums().ttft == 0.5
    assert first.sums().gaps == 0 and second.sums().gaps == 1 and second.sums().gap_seconds == 3.0
    assert first.backlog == 1 and first.end == 10.0 and second.measured_from == 12.0
    assert first.unfinished == 0 and not book.complete_rounds(2)  # the second block goes on
    book.end(20.0)
    assert len(book.complete_rounds(2)) == 1
    assert (first.records[0].prompt, first.records[0].tpot, first.sums().seconds) == (7, 1.75, 8.0)


@pytest.mark.parametrize("kind", ["gap", "envelope"])
@pytest.mark.parametrize(("gaps", "kept"), [((0.1, 0.1, 3.0), 1), ((0.1, 3.0, 0.1), 0), ((3.0, 0.1, 0.1), 0)])
def test_late_tokens_of_the_next_block_are_another_arms(kind, gaps, kept):
    """Read from the engine's tick, and at the client. The last token comes in the next block."""
    slo = Slo(1.0, 0.5, kind)
    request = SimpleNamespace(id=1, kind="", slo=slo, prompt=7, generated=4)
    *times, last = accumulate(gaps, initial=9.5)
    books = [Book({None: slo}), Book({None: slo})]
    for book in books:
        book.begin(0, 0, 0.0, burn=2.0)
    listener = Listener(books[0])
    listener.arrived(request, 9.0)
    listener.prefilled(request, 9.5)
    seen = books[1].arrived(9.0, "")
    books[1].first_token(seen, 9.5)
    for at in times[1:]:
        listener.stepped(SimpleNamespace(ends=(at,), decodes=1))
        books[1].next_token(seen, at)
    blocks = [book.begin(1, 0, times[-1] + 0.05, burn=0.0) for book in books]
    listener.stepped(SimpleNamespace(ends=(last,), decodes=1))
    listener.finished(request, last, End.STOPPED)
    books[1].next_token(seen, last)
    books[1].left(seen, last, True, 4)
    assert [book.blocks[0].sums().kept for book in books] == [kept, kept]
    assert [block.sums().gaps for block in blocks] == [1, 1]


def test_requests_that_never_end_have_broken_their_promises():
    book = Book({None: Slo(1.0, None)})
    block = book.begin(0, 0, 0.0, 0.0)
    seen = book.arrived(1.0, "")
    book.first_token(seen, 1.5)
    book.arrived(2.0, "")
    book.end(5.0)
    assert not book.complete_rounds(1)
    book.conclude()
    assert book.complete_rounds(1) == [[block]] and block.sums().kept == 0 and block.sums().requests == 2
    assert block.sums().failed == 2


def test_a_request_that_hangs_hides_no_rounds():
    book = Book({None: Slo(1.0, None)})
    block = book.begin(0, 0, 0.0, 0.0)
    hangs = book.arrived(1.0, "")
    book.end(5.0)
    book.give_up(34.0, 30.0)
    assert not book.complete_rounds(1)
    book.give_up(35.0, 30.0)
    assert book.complete_rounds(1) == [[block]] and (block.sums().promised, block.sums().kept) == (1, 0)
    assert book.waiting == 1  # it is still there
    book.first_token(hangs, 40.0)
    book.left(hangs, 41.0, True, 1)
    assert book.waiting == book.here == block.unfinished == 0 and len(block.records) == 1
    assert block.sums().kept == block.sums().firsts == 0


def test_requests_without_a_promise_keep_none():
    book = Book({"chat": Slo(1.0, None), "batch": Slo()})
    for number in range(8):
        for arm in (0, 1):
            at = 20.0 * number + 10.0 * arm
            book.begin(arm, number, at, 0.0)
            for place in range(10):
                seen = book.arrived(at, "batch" if place else "chat")
                book.first_token(seen, at + 2.0)
                book.left(seen, at + 2.0, True, 1)
    book.end(160.0)
    findings = judge(book, ("a", "b"), KEPT, 10, 0, Looks(), ended=True)
    change = findings.found[0].verdict(KEPT).change
    assert (change.baseline, change.arm) == (0.0, 0.0)  # of 8 promises, not 72 of 80 requests
    kept = next(each for each in findings.found[0].by_class["batch"] if each.metric is KEPT)
    assert kept.change is None and kept.word == CANNOT_TELL


def test_the_time_in_the_system_is_littles():
    book = Book()
    for start in range(10):
        seen = book.arrived(float(start), "")
        book.left(seen, start + 0.5, True, 1)
    assert book.time_in_system() == pytest.approx(0.5)


def test_light_load_and_one_policy_are_the_same():
    """A/A at 18/s: 36 of 40 orders of the arms, at least, find no difference in any figure's word."""
    book = book_of(open_world(18, 480, 1), ("mixed", "mixed"), 15, 5, 480, 1)
    blocks = [list(pair) for pair in zip(book.blocks[::2], book.blocks[1::2], strict=True)]
    false = {metric: 0 for metric in ("kept", "ttft", "ttft-p95", "tpot", "gap-p99")}
    for seed in range(40):
        for pair, order in zip(blocks, islice(in_rounds(2, 100 + seed), len(blocks)), strict=True):
            for block, arm in zip(pair, order, strict=True):
                block.arm = arm
        findings = judge(book, ("a", "b"), KEPT, 15, 5, Looks(), ended=True)
        assert findings.state.name == LIGHT and findings.rounds == 16
        for name, word in words(findings).items():
            false[name] += word in (MORE, LESS)
    assert max(false.values()) <= 4 and sum(false.values()) <= 14, false


def test_a_policy_that_keeps_promises_is_found():
    findings = findings_of(open_world(21, 420, 5), ("mixed", "keep"), 15, 5, 420, 5)
    kept, gap = (findings.found[0].verdict(metric) for metric in (KEPT, GAP_P99))
    assert kept.word == MORE and kept.better and kept.change.low > 0
    assert gap is None or gap.word == LESS  # a heavier seed would be called overload
    document = as_json(findings)
    assert document["found"]["keep"]["all"]["kept"]["word"] == MORE and document["baseline"] == "mixed"


def test_a_saturated_server_compares_throughput_and_no_waits():
    findings = findings_of(
        closed_world(11_000, 2), ("mixed", "eb+"), 30, 5, 460, 2, skip=60, primary=THROUGHPUT
    )
    assert findings.state.name == SATURATED and set(words(findings)) == {"throughput", "tpot", "gap-p99"}
    verdict = findings.found[0].verdict(THROUGHPUT)
    assert verdict.word == MORE and verdict.change.low < 0.027 < verdict.change.high  # 2.7 % alone
    assert findings.told


def test_too_few_rounds_and_no_promises():
    book = book_of(open_world(12, 160, 3), ("mixed", "keep"), 15, 5, 160, 3, judged=Slo())
    findings = judge(book, ("mixed", "keep"), TTFT, 15, 5, Looks(), ended=True)
    assert findings.rounds == 5 and set(words(findings).values()) == {CANNOT_TELL}
    assert "kept" not in words(findings) and not findings.told
    assert len(by_round(book, ("mixed", "keep"), TTFT)) == 5
    empty = judge(Book(), ("a", "b"), KEPT, 30, 5, Looks())
    assert empty.state is None and empty.rounds == 0 and as_json(empty)["state"] is None


def test_three_arms_share_the_error():
    arms = ("mixed", "again", "keep")
    book = book_of(open_world(12, 300, 3), ("mixed", "mixed", "keep"), 15, 5, 300, 3)
    findings = judge(book, arms, KEPT, 15, 5, Looks(comparisons=2), ended=True)
    assert [found.arm for found in findings.found] == [1, 2] and findings.rounds == 6
    assert all(found.verdict(KEPT).word in (SAME, CANNOT_TELL) for found in findings.found)


def test_classes_are_compared_by_themselves():
    world = open_world(12, 240, 3)
    kinds = Kind("chat", Slo(0.5, 0.1)), Kind("batch")
    kind = np.arange(len(world)) % 2
    mixed = Workload.of(world.prompt, world.output, arrival=world.arrival, kind=kind, kinds=kinds)
    findings = findings_of(mixed, ("mixed", "keep"), 15, 5, 240, 3)
    assert set(findings.found[0].by_class) == {"chat", "batch"}
    assert isinstance(as_json(findings)["found"]["keep"]["classes"]["chat"]["ttft"]["arm"], float)


def test_blocks_hold_only_what_is_measured():
    book, block = Book(), Block(0, 0, 10.0, 15.0, 40.0)
    book.blocks.append(block)
    assert [book.block_at(at) for at in (9.9, 14.9, 15.0, 40.0)] == [None, None, block, None]
    assert block.sums().seconds == 25.0
