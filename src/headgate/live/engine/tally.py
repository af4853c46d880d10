"""Counts what happens in an engine, in O(1) per event, for metrics and the log."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, ClassVar, NamedTuple

from headgate.core.build import mypyc_attr, quick
from headgate.core.plan import Plan
from headgate.core.policy import End, Observer, Steps
from headgate.core.request import ENVELOPE, GAP, Request, Slo
from headgate.live.engine.events import CAUSES, RAISED, LiveObserver

STATES = ("waiting", "prefilling", "decoding")
WAITING, PREFILLING, DECODING = range(3)
KINDS = ("mixed", "decode", "prefill", "empty")  # of steps
IDLE = "idle"
KEEP = "auto", "keep"  # two names of one policy
LONGEST_NAME = 64  # characters of a gauge's name
MOST_GAUGES = 256  # of one policy
NO_CLASS = "default"  # what requests without a class are shown as
# Counters by class and by tenant, and the gauge of what waits.
PROMISES, EVICTIONS, TENANT_TOKENS = "headgate_promises", "headgate_evictions", "headgate_tenant_tokens"
BY_CLASS = PROMISES, EVICTIONS, TENANT_TOKENS
QUEUE = "headgate_queue"
DELIVERIES = 4096.0  # of decodes, with which what was measured of their drafts loses half its weight
GONE_AT_MOST = 64  # entries of requests that left, beside those of as many as are here
MOST_GAPS = 1000  # that are remembered, each shorter than the one before it


class Times(NamedTuple):
    kind: str
    seconds: float
    steps: int = 1


@mypyc_attr(allow_interpreted_subclasses=True)
class Tally(LiveObserver):
    """What has happened so far. Reads nothing but its hooks; another thread may read its numbers.

    A *phase* is a run of steps of one kind. A *stall* is a gap between two tokens of a decode in which the
    engine ran prompts only, or other decodes: what holding decodes costs their readers. Gaps are those
    between deliveries: tokens that come together, accepted drafts, have none between them.
    """

    reads_gauges: ClassVar[bool] = False

    def __init__(self, policy: str = "") -> None:
        self.policy = policy
        self.fallen: str | None = None
        self.now = 0.0  # of the newest step
        self.kind = IDLE  # of the newest step
        # What every step adds to are plain numbers: one addition to a dict takes as long as five to these.
        self._decode_steps = self._mixed_steps = self._prefill_steps = 0
        self._decoded = self._prefilled = self._cached = 0  # tokens
        self.lost: defaultdict[str, int] = defaultdict(int)  # tokens computed in vain, by eviction and gone
        self.left: defaultdict[str, int] = defaultdict(int)  # requests, by how they left
        self.reasons: defaultdict[str, int] = defaultdict(int)  # fallbacks, by cause
        self.plans = self.evictions = self.rescues = self.renewals = self.bent_plans = 0
        self.kv = 0
        self.gauges: Mapping[str, float] = {}
        self.counts: Mapping[str, int] = {}  # the driver's own; only it knows of empty steps
        self.drafts = Drafts()  # likewise; empty without speculation
        self.states = [0, 0, 0]
        self.longest_stall = 0.0
        # Taken by the thread that shows them; the oldest go where there is none.
        self.step_times: deque[Times] = deque(maxlen=100_000)
        self.phase_times: deque[Times] = deque(maxlen=100_000)
        self.stalls: deque[float] = deque(maxlen=100_000)
        self.by_class = ClassTally()
        self._state: dict[int, int] = {}  # by request
        self._thrown: dict[int, int] = {}  # KV tokens by request that was evicted
        self._phase = 0.0  # seconds of the present one
        self._token = 0.0  # since when decodes have had no token
        self._stalled = False

    @property
    def mode(self) -> str:
        if self.fallen is not None:
            return "fallback"
        name = self.policy.partition(":")[0]
        if name in KEEP:  # its eb+ shows which way it would go, also while promises decide
            return KEEP[-1]
        exclusive = numbers(self.gauges).get("exclusive")
        return self.policy if exclusive is None else "exclusive" if exclusive else "mixed"

    @property
    def steps(self) -> dict[str, int]:
        return {"mixed": self._mixed_steps, "decode": self._decode_steps, "prefill": self._prefill_steps}

    @property
    def tokens(self) -> dict[str, int]:
        """Scheduled ones by kind; cached: prompt tokens found in the prefix cache."""
        return {"prefill": self._prefilled, "decode": self._decoded, "cached": self._cached}

    def all_steps(self) -> Counter[str]:
        return Counter(self.steps) + Counter({"empty": self.counts.get("empty", 0)})

    @property
    def phase(self) -> str:
        return self.kind if self._state else IDLE

    def renewed(self, policy: str, parameters: Mapping[str, Any], now: float) -> None:
        self.policy, self.fallen, self.gauges = policy, None, {}
        self.renewals += 1

    def arrived(self, request: Request, now: float) -> None:
        self._move(request.id, WAITING)
        self.by_class.arrived(request, now)

    def admitted(self, request: Request, now: float) -> None:
        if request.evictions:
            found_again = self._thrown.get(request.id, 0) - request.wasted
            if found_again > 0:
                self.lost["eviction"] -= found_again
                self._thrown[request.id] = request.wasted
        elif request.cached:
            self._cached += request.cached
        self._move(request.id, PREFILLING)
        self.by_class.admitted(request, now)

    def prefilled(self, request: Request, now: float) -> None:
        if not self.states[DECODING]:  # no other waits for a token
            self._token, self._stalled = now, False
        self._move(request.id, DECODING)
        self.by_class.prefilled(request, now)

    def held(self, request: Request, now: float) -> None:
        self.by_class.held(request, now)

    def resumed(self, request: Request, now: float) -> None:
        if request.last_token is not None:
            self._stall(now - request.last_token)
        self.by_class.resumed(request, now)

    def evicted(self, request: Request, now: float) -> None:
        self.evictions += 1
        self.lost["eviction"] += request.wasted - self._thrown.get(request.id, 0)
        self._thrown[request.id] = request.wasted
        self._move(request.id, WAITING)
        self.by_class.evicted(request, now)

    def finished(self, request: Request, now: float, how: End) -> None:
        self.left[how._value_] += 1  # `value` is a function of the enum
        self._thrown.pop(request.id, None)
        state = self._state.pop(request.id, None)
        if state is not None:
            self.states[state] -= 1
        self.by_class.finished(request, now, how)

    def _move(self, id: int, state: int) -> None:
        before = self._state.get(id)
        if before is not None:
            self.states[before] -= 1
        self._state[id] = state
        self.states[state] += 1

    def stepped(self, steps: Steps) -> None:
        start, ends, decodes, _, prefill, _, kv, queries = steps
        kind = ("mixed" if decodes else "prefill") if prefill else "decode"
        count, end = len(ends), ends[-1]
        took = end - start
        if kind != self.kind:
            if self._phase:
                self.phase_times.append(quick(Times, (self.kind, self._phase, 1)))
            self.kind, self._phase = kind, 0.0
        self._phase += took
        self._decoded += (queries or decodes) * count
        if not prefill:
            self._decode_steps += count
        else:
            self._prefilled += prefill * count
            if decodes:
                self._mixed_steps += count
            else:
                self._prefill_steps += count
        self.step_times.append(quick(Times, (kind, took / count, count)))
        self.now, self.kv = end, kv
        if decodes:
            self.by_class.stepped(steps)
            if self._stalled:
                self._stall(ends[0] - self._token)
                self._stalled = False
            self._token = end
        elif self.states[DECODING]:
            self._stalled = True

    def _stall(self, seconds: float) -> None:
        self.stalls.append(seconds)
        self.longest_stall = max(self.longest_stall, seconds)

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        self.plans += 1
        if gauges:  # the simulator's; a live engine shows them by `gauged`
            self.gauges = gauges

    def gauged(self, gauges: Mapping[str, float], now: float) -> None:
        self.gauges = gauges

    def fell_back(self, reason: str, now: float, cause: str = RAISED) -> None:
        """Counted by its cause: reasons are as many as there are requests."""
        self.fallen = reason
        self.reasons[cause if cause in CAUSES else RAISED] += 1

    def rescued(self, now: float) -> None:
        self.rescues += 1

    def bent(self, now: float) -> None:
        self.bent_plans += 1

    def wasted(self, tokens: int, now: float) -> None:
        self.lost["gone"] += tokens


class Envelope:
    """When the tokens of one request are due: token j at `start` + j x `pace`."""

    __slots__ = ("joined", "late", "number", "pace", "request", "start", "tokens")

    def __init__(self, start: float, pace: float, request: Request | None = None) -> None:
        self.start, self.pace = start, pace
        self.request = request  # where it knows its tokens better: drafts bring several at once
        self.tokens = 0  # until it joined those that share the tick
        self.joined = self.number = 0
        self.late = False

    def token(self, now: float) -> None:
        if now > self.start + self.pace * self.tokens:
            self.late = True
        self.tokens += 1


def envelope_of(slo: Slo, arrival: float, request: Request | None = None) -> Envelope | None:
    if slo.between_kind != ENVELOPE or slo.between_tokens is None or slo.first_token is None:
        return None
    return Envelope(arrival + slo.first_token, slo.between_tokens, request)


class Envelopes:
    """Finds late tokens of requests that share the tick; nothing is done for each token.

    At tick n, which ended at e, a request is late if e - pace x n exceeds start + pace x (its token - n).
    That does not change as long as it gets a token with every tick: requests of one pace wait in a heap.
    """

    def __init__(self) -> None:
        self._tick = self._numbers = 0
        self.here: dict[int, Envelope] = {}
        self._heaps: dict[float, list[tuple[float, int]]] = {}

    def join(self, envelope: Envelope) -> None:
        self.leave(envelope)
        self._numbers += 1
        envelope.number, envelope.joined = self._numbers, self._tick
        self.here[envelope.number] = envelope
        heap = self._heaps.setdefault(envelope.pace, [])
        if len(heap) > 2 * len(self.here) + GONE_AT_MOST:
            heap[:] = [entry for entry in heap if entry[1] in self.here]
            heapify(heap)
        heappush(heap, (self._bound(envelope, envelope.tokens - 1), envelope.number))

    def leave(self, envelope: Envelope) -> None:
        if envelope.number:
            del self.here[envelope.number]
            envelope.tokens += self._tick - envelope.joined
            envelope.number = 0

    def tick(self, end: float, left: int) -> None:
        """`left` later ticks are counted in the handles of requests already."""
        if not self.here:
            return
        self._tick += 1
        for pace, heap in self._heaps.items():
            height = end - pace * self._tick
            while heap and heap[0][0] < height:
                _, number = heappop(heap)
                envelope = self.here.get(number)
                if envelope is None:
                    continue
                # Its handle may be a tick ahead where steps overlap
                known = 0 if envelope.request is None else envelope.request.generated - 2 - left
                if end > envelope.start + pace * known:
                    envelope.late = True
                else:
                    heappush(heap, (self._bound(envelope, known), number))

    def _bound(self, envelope: Envelope, token: int) -> float:
        """Where `token` is the one that comes, or came, with the newest tick."""
        return envelope.start + envelope.pace * (token - self._tick)


class ServedRequest:
    __slots__ = ("began", "between", "broken", "envelope", "first", "fresh", "last", "since", "waits")

    def __init__(self, between: float, envelope: Envelope | None) -> None:
        self.between = between  # the longest gap it was promised
        self.envelope = envelope
        self.waits = True
        self.first = False  # its first token has come
        self.began = 0.0  # when that was
        self.broken = False  # a gap was longer than promised
        self.fresh = False  # its next token is its first with the others, or its first after a pause
        self.last = 0.0  # when its newest token came, as long as it does not share the tick
        self.since = inf  # later gaps of those that share the tick are its own


@mypyc_attr(allow_interpreted_subclasses=True)
class ClassTally(Observer):
    """Queues, evictions and promises by class, tokens by tenant; nothing is done for each token.

    Decodes that share the tick share their gaps, so only gaps beyond the shortest promise are noted, once for
    all. A request asks for the longest since it joined when it ends or is paused.
    """

    def __init__(self) -> None:
        self._waiting: defaultdict[str, int] = defaultdict(int)
        self._evictions: defaultdict[str, int] = defaultdict(int)
        self._promises: defaultdict[tuple[str, str, bool], int] = defaultdict(int)
        self._tokens: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self._here: dict[int, ServedRequest] = {}
        self._fresh: list[ServedRequest] = []
        self._tick = 0.0  # when decodes last got their tokens
        self._envelopes = Envelopes()
        self._shortest = inf  # gap that was ever promised
        # Gaps too long for one promise or another, and when they ended: each is longer than all later ones.
        self._gaps: list[float] = []
        self._gap_ends: list[float] = []

    def shown(self) -> dict[str, dict[tuple[str, ...], int]]:
        promises: dict[tuple[str, ...], int] = {
            (kind or NO_CLASS, promise, "true" if kept else "false"): count
            for (kind, promise, kept), count in list(self._promises.items())
        }
        return {
            PROMISES: promises,
            EVICTIONS: {(kind or NO_CLASS,): count for kind, count in list(self._evictions.items())},
            TENANT_TOKENS: dict(self._tokens),
            QUEUE: {(kind or NO_CLASS,): count for kind, count in list(self._waiting.items())},
        }

    def arrived(self, request: Request, now: float) -> None:
        slo, between = request.slo, inf
        if slo.between_tokens is not None and slo.between_kind == GAP:
            between = slo.between_tokens
            self._shortest = min(self._shortest, between)
        self._here[request.id] = ServedRequest(between, envelope_of(slo, request.arrival, request))
        self._waiting[request.kind] += 1

    def admitted(self, request: Request, now: float) -> None:
        seen = self._here.get(request.id)
        if seen is not None and seen.waits:
            seen.waits = False
            self._waiting[request.kind] -= 1

    def prefilled(self, request: Request, now: float) -> None:
        seen = self._here.get(request.id)
        if seen is None:
            return
        if not seen.first:
            seen.first = True
            seen.began = now
            if request.slo.first_token is not None:
                kept = now - request.arrival <= request.slo.first_token
                self._promises[request.kind, "ttft", kept] += 1
            if request.tenant:
                self._tokens[request.tenant, "prompt"] += request.prompt
        elif now - seen.last > seen.between:
            seen.broken = True
        seen.last = now
        if seen.envelope is not None:
            seen.envelope.tokens = request.generated - 1
            seen.envelope.token(now)
        self._join(seen)

    def resumed(self, request: Request, now: float) -> None:
        seen = self._here.get(request.id)
        if seen is not None:
            self._join(seen)

    def held(self, request: Request, now: float) -> None:
        seen = self._here.get(request.id)
        if seen is not None:
            self._pause(seen)

    def evicted(self, request: Request, now: float) -> None:
        self._evictions[request.kind] += 1
        seen = self._here.get(request.id)
        if seen is None:
            return
        self._pause(seen)
        if not seen.waits:
            seen.waits = True
            self._waiting[request.kind] += 1

    def finished(self, request: Request, now: float, how: End) -> None:
        """A promise counts when its outcome is known: not if the client hung up before its time was over."""
        seen = self._here.pop(request.id, None)
        if seen is None:
            return
        if seen.waits:
            self._waiting[request.kind] -= 1
        self._pause(seen)
        promise = request.slo.first_token
        if not seen.first:
            if promise is not None and (how is End.REFUSED or now - request.arrival > promise):
                self._promises[request.kind, "ttft", False] += 1
            return
        slo = request.slo
        if slo.between_tokens is None:
            pass
        elif slo.between_kind == GAP:
            self._promises[request.kind, "tbt", not seen.broken] += 1
        elif seen.envelope is not None:
            self._promises[request.kind, "envelope", not seen.envelope.late] += 1
        else:
            last, gaps = request.last_token, request.generated - 1
            mean = (last - seen.began) / gaps if last is not None and gaps > 0 else 0.0
            self._promises[request.kind, "tpot", mean <= slo.between_tokens] += 1
        if request.tenant:
            self._tokens[request.tenant, "output"] += request.generated

    def stepped(self, steps: Steps) -> None:
        ends = steps.ends
        if not steps.decodes:
            return
        for number, end in enumerate(ends, 1):
            self._envelopes.tick(end, len(ends) - number)
        if self._shortest == inf:  # no gap was ever promised
            self._tick = ends[-1]
            return
        if self._fresh:
            for seen in self._fresh:
                if seen.fresh:
                    seen.fresh = False
                    seen.since = ends[0]
                    if ends[0] - seen.last > seen.between:
                        seen.broken = True
            self._fresh.clear()
        tick, shortest = self._tick, self._shortest
        for end in ends:
            if end - tick > shortest:
                self._note(end - tick, end)
            tick = end
        self._tick = tick

    def _note(self, gap: float, end: float) -> None:
        gaps, gap_ends = self._gaps, self._gap_ends
        while gaps and gaps[-1] <= gap:
            gaps.pop()
            gap_ends.pop()
        if len(gaps) >= MOST_GAPS:
            del gaps[0], gap_ends[0]
        gaps.append(gap)
        gap_ends.append(end)

    def _join(self, seen: ServedRequest) -> None:
        """From the next step on it gets a token with the others; only some promises need to know."""
        if seen.envelope is not None:
            self._envelopes.join(seen.envelope)
        if seen.between < inf and not seen.fresh:
            seen.fresh = True
            self._fresh.append(seen)

    def _pause(self, seen: ServedRequest) -> None:
        seen.fresh = False
        if seen.envelope is not None:
            self._envelopes.leave(seen.envelope)
        if seen.since < inf:
            later = bisect_right(self._gap_ends, seen.since)
            if later < len(self._gaps) and self._gaps[later] > seen.between:
                seen.broken = True
            seen.last, seen.since = max(self._tick, seen.since), inf


class DraftCounts:
    __slots__ = ("accepted", "drafted", "steps", "tokens")

    def __init__(self) -> None:
        self.drafted = self.accepted = 0
        self.steps = self.tokens = 0.0  # the older, the less they count

    def count(self, steps: int, tokens: int) -> None:
        kept = 0.5 ** (steps / DELIVERIES)
        self.steps, self.tokens = kept * self.steps + steps, kept * self.tokens + tokens

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 1.0


class Drafts(DraftCounts):
    """Steps of decodes without drafts count: policies that turn tokens into steps need the mean over all."""

    def __init__(self) -> None:
        super().__init__()
        self.by_class: dict[str, DraftCounts] = {}  # another thread may read it

    def saw(self, deliveries: Iterable[tuple[str, int, int]]) -> None:
        sums: dict[str, tuple[int, int]] = {}  # steps and tokens
        for kind, tokens, drafted in deliveries:
            if not tokens:  # it had gone
                continue
            counts = self.by_class.get(kind)
            if counts is None:
                counts = self.by_class[kind] = DraftCounts()
            counts.drafted += drafted
            counts.accepted += min(drafted, tokens - 1)
            steps, all_tokens = sums.get(kind, (0, 0))
            sums[kind] = steps + 1, all_tokens + tokens
        for kind, (steps, all_tokens) in sums.items():
            self.by_class[kind].count(steps, all_tokens)
        both = sums.values()
        self.count(sum([steps for steps, _ in both]), sum([tokens for _, tokens in both]))


def numbers(gauges: object) -> dict[str, float]:
    """By name. A policy is the user's code and may show anything: what is no number is left out."""
    if not isinstance(gauges, Mapping):
        return {}
    shown: dict[str, float] = {}
    for name, value in list(gauges.items())[:MOST_GAUGES]:
        try:
            shown[str(name)[:LONGEST_NAME]] = float(value)
        except Exception:  # float() of the user's own type may raise anything
            continue
    return shown
