"""The books of a trial: which block a request, a gap, a token counts in; and what was found in them.

A request counts where it arrives, gaps and tokens where they come: no request that crosses a switch is lost.
Its promised gaps are judged until its block ends: later ones are the other arm's, and 71 of 98 % were left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import numpy as np

from headgate.core.policy import COMPLETE, End, Observer, Steps
from headgate.core.request import GAP, MEAN, NO_SLO, Request, Slo
from headgate.live.engine.tally import Envelope, Envelopes, envelope_of
from headgate.stats.figures import figures
from headgate.stats.metrics import without_nan
from headgate.stats.switchback import (
    ALLOWED,
    BINS,
    CANNOT_TELL,
    FAILURES,
    KEPT,
    SAME,
    TTFT,
    TTFT_P95,
    Looks,
    Metric,
    State,
    Sums,
    Verdict,
    bin_of,
    judge_metric,
    middle_of,
    quantile,
    state_of,
)
from headgate.stats.vllm_bench import latency, totals


@dataclass(eq=False, slots=True)
class SeenRequest:
    kind: str
    slo: Slo
    at: float
    prompt: int
    block: Block | None  # where it counts
    first: float | None = None
    newest: float = 0.0  # when its newest token came, where it does not share the engine's tick
    slow: bool = False  # it had a gap longer than promised
    late_before: float = 0  # see `Listener`
    envelope: Envelope | None = None

    @property
    def judged(self) -> bool:
        return self.block is not None and self.block.end == inf


@dataclass(slots=True)
class Record:
    prompt: int
    output: int
    ttft: float | None
    tpot: float | None
    seconds: float
    complete: bool
    kept: bool


@dataclass(eq=False)
class Block:
    arm: int
    round: int
    start: float
    measured_from: float  # after its burn-in
    end: float = inf
    by_class: defaultdict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    unfinished: int = 0  # requests that count in it and are still here
    backlog: int = 0  # requests without a first token at its end
    records: list[Record] = field(default_factory=list)

    def sums(self, kind: str | None = None) -> Sums:
        parts = list(self.by_class.values()) if kind is None else [self.by_class.get(kind, Sums())]
        total = Sums()
        for part in parts:
            for name, value in vars(part).items():
                setattr(total, name, getattr(total, name) + value)
        total.seconds = max(self.end - self.measured_from, 0.0)
        return total


class Book:
    """Reads no clock. `judged` promises, by class (None: all not named), replace those of requests."""

    def __init__(self, judged: dict[str | None, Slo] | None = None) -> None:
        self.blocks: list[Block] = []
        self.here = self.waiting = self.came = self.finished = 0
        self.first_at: float | None = None  # of anything
        self.newest = 0.0
        self.promises = False  # whether any request was promised anything
        self._judged = judged or {}
        self._inside: set[SeenRequest] = set()
        self._area, self._booked = 0.0, 0.0  # request-seconds in the system, and until when they are known

    @property
    def open(self) -> Block | None:
        return self.blocks[-1] if self.blocks and self.blocks[-1].end == inf else None

    def begin(self, arm: int, round: int, at: float, burn: float) -> Block:
        self.end(at)
        block = Block(arm, round, at, at + burn)
        self.blocks.append(block)
        return block

    def end(self, at: float) -> None:
        if (block := self.open) is not None:
            block.end, block.backlog = at, self.waiting

    def forget_round(self, round: int) -> None:
        self.blocks = [block for block in self.blocks if block.round != round]

    def conclude(self) -> None:
        for seen in list(self._inside):
            self.left(seen, self.newest, False, 0)

    def give_up(self, at: float, patience: float) -> None:
        """Requests so long after their block have broken promises: one that hangs would hide later rounds."""
        for seen in self._inside:
            if seen.block is not None and at >= seen.block.end + patience:
                self._settle(seen, at, False, 0)

    def block_at(self, at: float) -> Block | None:
        for block in reversed(self.blocks):
            if at >= block.start:
                return block if block.measured_from <= at < block.end else None
        return None

    def complete_rounds(self, arms: int) -> list[list[Block]]:
        """Rounds of which every request that counts has ended, in order, up to the first that has not."""
        by_round: dict[int, dict[int, Block]] = {}
        for block in self.blocks:
            by_round.setdefault(block.round, {})[block.arm] = block
        found = []
        for blocks in by_round.values():
            if len(blocks) < arms or any(block.end == inf or block.unfinished for block in blocks.values()):
                break
            found.append([blocks[arm] for arm in range(arms)])
        return found

    def backlog_seconds(self, requests: int) -> float:
        """How long so many requests take at the rate at which they have ended so far."""
        begin = self.first_at if self.first_at is not None else self.newest
        return requests / max(self.finished / max(self.newest - begin, 1e-9), 1e-9)

    def time_in_system(self) -> float:
        """Mean time of a request in the system so far, by Little's law."""
        return self._area / max(self.came, 1)

    def arrived(
        self, at: float, kind: str, slo: Slo = NO_SLO, prompt: int = 0, request: Request | None = None
    ) -> SeenRequest:
        self._until(at)
        self.here += 1
        self.waiting += 1
        self.came += 1
        slo = self._judged.get(kind, self._judged.get(None, slo))
        promised = slo[:2] != (None, None)
        self.promises = self.promises or promised
        block = self.block_at(at)
        seen = SeenRequest(kind, slo, at, prompt, block, envelope=envelope_of(slo, at, request))
        self._inside.add(seen)
        if block is not None:
            block.by_class[kind].requests += 1
            block.by_class[kind].promised += promised
            block.unfinished += 1
        return seen

    def first_token(self, seen: SeenRequest, at: float) -> None:
        self._until(at)
        self.waiting -= 1
        seen.first = seen.newest = at
        if seen.envelope is not None:
            seen.envelope.token(at)
        if seen.block is not None:
            sums, ttft = seen.block.by_class[seen.kind], at - seen.at
            sums.ttft += ttft
            sums.firsts += 1
            sums.ttft_bins[bin_of(ttft)] += 1
        if (block := self.block_at(at)) is not None:
            block.by_class[seen.kind].tokens += 1

    def next_token(self, seen: SeenRequest, at: float) -> None:
        gap, seen.newest = at - seen.newest, at
        if seen.judged:
            seen.slow = seen.slow or gap > _promise(seen)
            if seen.envelope is not None:
                seen.envelope.token(at)
        self.gaps(seen.kind, gap, at)

    def gaps(self, kind: str, seconds: float, at: float, count: int = 1) -> None:
        self.newest = max(self.newest, at)
        if (block := self.block_at(at)) is not None:
            sums = block.by_class[kind]
            sums.tokens += count
            sums.gaps += count
            sums.gap_seconds += seconds * count
            sums.gap_bins[bin_of(seconds)] += count

    def left(self, seen: SeenRequest, at: float, complete: bool, output: int) -> None:
        if seen not in self._inside:
            return
        self._until(at)
        self._inside.discard(seen)
        self.here -= 1
        self.finished += complete
        if seen.first is None:
            self.waiting -= 1
        self._settle(seen, at, complete, output)

    def _settle(self, seen: SeenRequest, at: float, complete: bool, output: int) -> None:
        block, seen.block = seen.block, None
        if block is None:
            return
        ttft = None if seen.first is None else seen.first - seen.at
        tpot = (seen.newest - seen.first) / (output - 1) if seen.first is not None and output > 1 else None
        slo, sums = seen.slo, block.by_class[seen.kind]
        late = seen.slow or (seen.envelope is not None and seen.envelope.late)
        if slo.between_kind == MEAN and slo.between_tokens is not None and tpot is not None:
            late = late or tpot > slo.between_tokens
        in_time = ttft is not None and (slo.first_token is None or ttft <= slo.first_token)
        kept = complete and in_time and not late
        sums.kept += kept and slo[:2] != (None, None)
        sums.failed += not complete
        block.unfinished -= 1
        block.records.append(Record(seen.prompt, output, ttft, tpot, at - seen.at, complete, kept))

    def _until(self, at: float) -> None:
        if self.first_at is None:
            self.first_at = self.newest = at
        self.newest = max(self.newest, at)
        self._area += self.here * max(at - self._booked, 0.0)
        self._booked = max(at, self._booked)


class Listener(Observer):
    """Decodes that share the engine's tick get a token with every step, so nothing is done for each of them:
    a tick is booked once for each class, and a gap that breaks a promise is counted once for each length
    promised. Whether a request had one is a difference of two such counts.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self._seen: dict[int, SeenRequest] = {}
        self._fresh: list[SeenRequest] = []  # share the tick, but their newest token did not come with it
        self._steady: dict[str, int] = {}  # by class: so many whose newest token did
        self._ticking: set[int] = set()
        self._tick = 0.0  # when the newest one was
        self._late: dict[float, int] = {}  # by promise: ticks that came later than that
        self._envelopes = Envelopes()
        self._block: Block | None = None

    def arrived(self, request: Request, now: float) -> None:
        self._seen[request.id] = self.book.arrived(now, request.kind, request.slo, request.prompt, request)

    def prefilled(self, request: Request, now: float) -> None:
        if (seen := self._seen.get(request.id)) is None:
            return
        if seen.first is None:
            self.book.first_token(seen, now)
        else:
            self.book.next_token(seen, now)
        self._join(request.id, seen)

    def resumed(self, request: Request, now: float) -> None:
        if (seen := self._seen.get(request.id)) is not None:
            self._join(request.id, seen)

    def held(self, request: Request, now: float) -> None:
        self._leave(request.id)

    evicted = held

    def finished(self, request: Request, now: float, how: End) -> None:
        self._leave(request.id)
        if (seen := self._seen.pop(request.id, None)) is not None:
            self.book.left(seen, now, how in COMPLETE, request.generated)

    def stepped(self, steps: Steps) -> None:
        if self.book.open is not self._block:  # what comes now is not held against those that were here
            self._block = self.book.open
            for seen in {self._seen[id] for id in self._ticking}.difference(self._fresh):
                self._look(seen)
        for number, now in enumerate(steps.ends if steps.decodes else (), 1):
            fresh, self._fresh = self._fresh, []
            gap, self._tick = now - self._tick, now
            for kind, count in self._steady.items():
                if count:
                    self.book.gaps(kind, gap, now, count)
            for promise in self._late:
                self._late[promise] += gap > promise
            self._envelopes.tick(now, len(steps.ends) - number)
            for seen in fresh:
                self.book.next_token(seen, now)
                if seen.envelope is not None and seen.judged:
                    self._envelopes.join(seen.envelope)
                self._steady[seen.kind] = self._steady.get(seen.kind, 0) + 1
                late = self._late.setdefault(_promise(seen), 0)
                seen.late_before = late if seen.judged else inf

    def _join(self, id: int, seen: SeenRequest) -> None:
        if id not in self._ticking:
            self._ticking.add(id)
            self._fresh.append(seen)

    def _leave(self, id: int) -> None:
        if id not in self._ticking:
            return
        self._ticking.discard(id)
        seen = self._seen[id]
        if seen in self._fresh:
            self._fresh.remove(seen)
            return
        self._steady[seen.kind] -= 1
        seen.newest = self._tick
        self._look(seen)

    def _look(self, seen: SeenRequest) -> None:
        if seen.envelope is not None:
            self._envelopes.leave(seen.envelope)
        seen.slow = seen.slow or self._late[_promise(seen)] > seen.late_before
        seen.late_before = inf


def _promise(seen: SeenRequest) -> float:
    slo = seen.slo
    return slo.between_tokens if slo.between_tokens is not None and slo.between_kind == GAP else inf


# -- findings: each arm beside the baseline, overall and by class

BACKEND = "headgate-trial"
MORE_DIGITS = 6


@dataclass(frozen=True)
class ArmFound:
    arm: int
    verdicts: tuple[Verdict, ...]
    by_class: dict[str, tuple[Verdict, ...]] = field(default_factory=dict)
    failed: tuple[float, float] | None = None  # shares of baseline and arm, where TTFT is left out for them

    def verdict(self, metric: Metric) -> Verdict | None:
        return next((each for each in self.verdicts if each.metric is metric), None)


@dataclass(frozen=True)
class Findings:
    arms: tuple[str, ...]
    primary: Metric
    rounds: int
    block: float
    burn: float
    state: State | None  # None before the first round
    found: tuple[ArmFound, ...]
    requests: tuple[int, ...]  # by arm: that were judged
    failed: tuple[int, ...]  # of those

    @property
    def told(self) -> bool:
        verdicts = [each.verdict(self.primary) for each in self.found]
        return bool(verdicts) and all(v is not None and v.word not in (SAME, CANNOT_TELL) for v in verdicts)

    def minutes(self, rounds: int) -> float:
        return rounds * len(self.arms) * self.block / 60


def judge(
    book: Book,
    arms: Sequence[str],
    primary: Metric,
    block: float,
    burn: float,
    looks: Looks,
    ended: bool = False,
) -> Findings:
    """`ended`: this is the planned end; before it, intervals hold at any look."""
    rounds = book.complete_rounds(len(arms))
    arms_of = zip(*rounds, strict=True)
    waits = [[book.backlog_seconds(block.backlog) for block in arm] for arm in arms_of]
    state = state_of(waits) if rounds else None
    allowed = ALLOWED[state.name] if state is not None else ()
    if not book.promises:
        allowed = tuple(metric for metric in allowed if metric is not KEPT)
    levels = (looks.at_the_end, None) if ended else (looks.on_the_way, looks.later)

    def verdicts(arm: int, metrics: Sequence[Metric], kind: str | None = None) -> tuple[Verdict, ...]:
        pairs = [(blocks[0].sums(kind), blocks[arm].sums(kind)) for blocks in rounds]
        return tuple(judge_metric(metric, pairs, *levels) for metric in metrics)

    sums = [[blocks[arm].sums() for blocks in rounds] for arm in range(len(arms))]
    requests = tuple(round(sum(one.requests for one in mine)) for mine in sums)
    failed = tuple(round(sum(one.failed for one in mine)) for mine in sums)
    shares = [lost / max(count, 1) for lost, count in zip(failed, requests, strict=True)]
    classes = sorted({kind for each in book.blocks for kind in each.by_class})
    found = []
    for arm in range(1, len(arms)):
        apart = (shares[0], shares[arm]) if abs(shares[arm] - shares[0]) > FAILURES else None
        fair = [each for each in allowed if apart is None or each not in (TTFT, TTFT_P95)]
        by_class = {kind: verdicts(arm, fair, kind) for kind in classes if len(classes) > 1}
        found.append(ArmFound(arm, verdicts(arm, fair), by_class, apart))
    return Findings(tuple(arms), primary, len(rounds), block, burn, state, tuple(found), requests, failed)


def as_json(findings: Findings) -> dict[str, Any]:
    state = findings.state
    return {
        "arms": list(findings.arms),
        "baseline": findings.arms[0],
        "primary": findings.primary.name,
        "requests": dict(zip(findings.arms, findings.requests, strict=True)),
        "failed": dict(zip(findings.arms, findings.failed, strict=True)),
        "rounds": findings.rounds,
        "block_seconds": findings.block,
        "burn_in_seconds": findings.burn,
        "state": None if state is None else state.name,
        "backlog_seconds": None if state is None else [_known(state.low), _known(state.high)],
        "found": {
            findings.arms[each.arm]: {
                "all": _verdicts(findings, each.verdicts),
                "classes": {kind: _verdicts(findings, one) for kind, one in each.by_class.items()},
            }
            for each in findings.found
        },
    }


def _verdicts(findings: Findings, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    rows = {}
    for verdict in verdicts:
        change, missing = verdict.change, verdict.rounds_missing
        of = {"baseline": "baseline", "arm": "arm", "change": "value", "low": "low", "high": "high"}
        rows[verdict.metric.name] = {
            "word": verdict.word,
            "better": verdict.better,
            "unit": "share" if verdict.metric.share else "relative",
            **{name: change and _known(getattr(change, each)) for name, each in of.items()},
            "more_minutes": None if missing is None else _known(findings.minutes(missing)),
        }
    return rows


def _known(value: float | None) -> float | None:
    return round(value, MORE_DIGITS) if value is not None and isfinite(value) else None


def by_round(book: Book, arms: Sequence[str], metric: Metric) -> list[list[float | None]]:
    rounds = book.complete_rounds(len(arms))
    return [[_figure(metric, block.sums()) for block in blocks] for blocks in rounds]


def _figure(metric: Metric, sums: Sums) -> float | None:
    if metric.quantile:
        bins = getattr(sums, metric.top)
        return quantile(bins, metric.quantile) if bins.sum() else None
    under = getattr(sums, metric.under)
    return getattr(sums, metric.top) / under if under else None


# -- in the words of `vllm bench serve --save-result`


def bench_result(
    book: Book, arm: int, name: str, model: str, date: str, rate: float | None
) -> dict[str, Any]:
    """As that tool would have measured one arm. Gaps are from histograms of 1 %; two peaks are not known."""
    blocks = [block for block in book.blocks if block.arm == arm]
    records = [record for block in blocks for record in block.records]
    seconds = sum(block.sums().seconds for block in blocks)
    done = [record for record in records if record.complete]
    tokens_in, tokens_out = (sum(getattr(r, what) for r in done) for what in ("prompt", "output"))
    about = {
        "date": date,
        "endpoint_type": BACKEND,
        "backend": BACKEND,
        "label": name,
        "model_id": model,
        "tokenizer_id": model,
        "request_rate": rate or "inf",
    }
    kept = float(sum(r.kept for r in records)) if book.promises else None
    result = totals(about, (len(records), len(done)), (tokens_in, tokens_out), kept, seconds)
    for what, of in (("ttft", "ttft"), ("tpot", "tpot"), ("e2el", "seconds")):
        values = [value for record in done if (value := getattr(record, of)) is not None]
        result |= latency(what, figures(np.array(values)))
    gaps = sum((block.sums().gap_bins for block in blocks), np.zeros(BINS))
    result |= latency("itl", figures(middle_of(np.arange(float(BINS))), weights=gaps.astype(np.int64)))
    plain: dict[str, Any] = without_nan(result)
    return plain
