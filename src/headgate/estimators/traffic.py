"""What comes and how it behaves, learned while it runs: rates, lengths and patience by class of requests.

Everything is an exponential window in time: what was seen s seconds ago counts exp(-s / T). Output
lengths and patience are ratios of endings to exposure (tokens decoded, seconds waited), so requests that
still run or wait count as far as they have come. A mean over completed requests alone would be too short
after every start or shift, because short requests end first.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log
from typing import NamedTuple

from headgate.core.request import Request, uncached

PRIOR = 10.0  # requests of a class that what is assumed of it counts for at the start; they fade like others
ENOUGH = 30  # arrivals, or exits from a queue that none was assumed to leave, before these are believed
TINY = 1e-9  # of what is left of a window: too little to divide by
MOST_CACHED = 0.99  # of a prompt: at least its last block is computed
LONGEST_PATIENCE = 3600.0  # seconds; a class that is more patient than that counts as never giving up


class ClassEstimate(NamedTuple):
    rate: float  # arrivals per second
    prompt: float  # tokens
    output: float  # tokens
    impatience: float  # 1 / mean patience in seconds; 0: no request gives up
    cached: float = 0.0  # of the prompt, tokens that engines found in their prefix caches

    @property
    def computed(self) -> float:
        return self.prompt - self.cached


class Decaying:
    __slots__ = ("_at", "_seconds", "_value")

    def __init__(self, seconds: float) -> None:
        self._seconds, self._value, self._at = seconds, 0.0, 0.0

    def add(self, x: float, now: float) -> None:
        self._value = self.value(now) + x
        self._at = now

    def lasted(self, level: float, since: float, now: float) -> None:
        """A level that lasted from `since` to now, as an integral over time."""
        left = exp((self._at - now) / self._seconds)
        passed = left if since == self._at else exp((since - now) / self._seconds)
        self._value = self._value * left + level * (self._seconds * (1.0 - passed))
        self._at = now

    def value(self, now: float) -> float:
        return self._value * exp((self._at - now) / self._seconds)


class WindowRate:
    """Events per second by exponential window; a window that is not full yet counts as long as it is."""

    __slots__ = ("_events", "_seconds", "_start", "count")

    def __init__(self, half_life: float) -> None:
        self._seconds = half_life / log(2)
        self._events = Decaying(self._seconds)
        self._start: float | None = None
        self.count = 0

    def update(self, now: float) -> None:
        if self._start is None:
            self._start = now
        self._events.add(1.0, now)
        self.count += 1

    def value(self, now: float, since: float | None = None) -> float:
        """Events per second, counted from the first event or from `since`; at least one second long."""
        start = self._start if since is None else since
        if start is None or self._start is None:
            return 0.0
        counted = self._seconds * (exp(-max(now - start, 1.0) / self._seconds) - 1.0)
        return self._events.value(now) / -counted


class ClassTraffic:
    """One class. What is assumed of it counts as a few requests that were seen before the start."""

    def __init__(self, assumed: ClassEstimate, half_life: float, now: float, weight: float = PRIOR) -> None:
        seconds = half_life / log(2)
        self.assumed, self._half_life, self._began = assumed, half_life, now
        self._rate = WindowRate(half_life)
        self._prompts, self._came = Decaying(seconds), Decaying(seconds)
        self._tokens, self._ended = Decaying(seconds), Decaying(seconds)
        self._found, self._asked = Decaying(seconds), Decaying(seconds)
        self._waited, self._gave_up = Decaying(seconds), Decaying(seconds)
        self._waiting, self._since = 0, now
        self._exits = 0
        for total, x in (
            (self._prompts, assumed.prompt),
            (self._came, 1.0),
            (self._tokens, assumed.output),
            (self._ended, 1.0),
            (self._found, assumed.cached),
            (self._asked, assumed.prompt),
        ):
            total.add(weight * x, now)
        if assumed.impatience > 0:
            self._waited.add(weight / assumed.impatience, now)
            self._gave_up.add(weight, now)

    def arrived(self, prompt: int, now: float) -> None:
        self._rate.update(now)
        self._prompts.add(float(prompt), now)
        self._came.add(1.0, now)
        self.queue(1, now)

    def gave_up(self, now: float) -> None:
        self.queue(-1, now)
        self._gave_up.add(1.0, now)
        self._exits += 1

    def decoded(self, tokens: int, since: float, now: float, ended: bool) -> None:
        if now > since:
            self._tokens.lasted(tokens / (now - since), since, now)
        else:
            self._tokens.add(float(tokens), now)
        if ended:
            self._ended.add(1.0, now)

    def found(self, cached: int, prompt: int, now: float) -> None:
        self._found.add(float(cached), now)
        self._asked.add(float(prompt), now)

    def seen(self, now: float) -> ClassEstimate:
        """The estimates; a rate is as assumed until enough came, or a half-life has passed."""
        self.queue(0, now)
        rate, prompt, output, impatience, cached = self.assumed
        if self._rate.count >= ENOUGH or now - self._began >= self._half_life:
            rate = self._rate.value(now, self._began)
        came, ended, waited = self._came.value(now), self._ended.value(now), self._waited.value(now)
        if came > TINY:
            prompt = self._prompts.value(now) / came
        if ended > TINY:
            output = self._tokens.value(now) / ended
        if waited > TINY and (impatience > 0 or self._exits >= ENOUGH):
            impatience = self._gave_up.value(now) / waited
        impatience = impatience if impatience > 1 / LONGEST_PATIENCE else 0.0
        prompt, asked = max(prompt, 1.0), self._asked.value(now)
        if asked > TINY:  # a share, because requests end later than they come
            cached = min(self._found.value(now) / asked, MOST_CACHED) * prompt
        return ClassEstimate(rate, prompt, max(output, 1.0), impatience, cached)

    def queue(self, change: int, now: float) -> None:
        """So many joined the queue or left it, whether they are arrivals or not."""
        self._waited.lasted(self._waiting, self._since, now)
        self._waiting += change
        self._since = now


class TrafficEstimator:
    def __init__(self, assumed: Mapping[str, ClassEstimate], half_life: float, now: float = 0.0) -> None:
        self._half_life = half_life
        self.kinds = {kind: ClassTraffic(seen, half_life, now) for kind, seen in assumed.items()}
        self._waiting: set[int] = set()
        self._running: dict[int, tuple[Request, int, float]] = {}  # tokens that are counted, and until when

    def arrived(self, request: Request, now: float) -> None:
        """It joins the queue. A class that is new begins with what its first request shows."""
        self._waiting.add(request.id)
        self._kind(request, now).arrived(request.prompt, now)

    def adopt(self, request: Request, now: float, waits: bool) -> None:
        """It was there before we looked: it is no arrival, and its tokens count from now on."""
        kind = self._kind(request, now)
        if waits:
            self._waiting.add(request.id)
            kind.queue(1, now)
        else:
            self._running[request.id] = request, request.generated, now

    def started(self, request: Request, now: float) -> None:
        """It was sent to an engine; again when its decode is sent to another."""
        if request.id in self._waiting:
            self._waiting.discard(request.id)
            self.kinds[request.kind].queue(-1, now)
            self._running[request.id] = request, request.generated, now

    def returned(self, request: Request, now: float) -> None:
        """Its engine failed it; it waits again and its tokens do not count."""
        if request.id not in self._waiting:
            self._running.pop(request.id, None)
            self._waiting.add(request.id)
            self.kinds[request.kind].queue(1, now)

    def finished(self, request: Request, now: float) -> None:
        self.kinds[request.kind].found(request.prompt - uncached(request), request.prompt, now)
        self._count(request, now, True)
        self._running.pop(request.id, None)

    def left(self, request: Request, now: float, gave_up: bool) -> None:
        kind = self.kinds[request.kind]
        if request.id in self._waiting:
            self._waiting.discard(request.id)
            kind.gave_up(now) if gave_up else kind.queue(-1, now)
        else:
            self._count(request, now, False)
            self._running.pop(request.id, None)

    def seen(self, now: float) -> dict[str, ClassEstimate]:
        """Every class, requests that run counted as far as they have come."""
        for request, *_ in [*self._running.values()]:
            self._count(request, now, False)
        return {kind: traffic.seen(now) for kind, traffic in self.kinds.items()}

    def _kind(self, request: Request, now: float) -> ClassTraffic:
        if request.kind not in self.kinds:
            first = ClassEstimate(0.0, float(request.prompt), 1.0, 0.0)
            self.kinds[request.kind] = ClassTraffic(first, self._half_life, now, weight=0.0)
        return self.kinds[request.kind]

    def _count(self, request: Request, now: float, ended: bool) -> None:
        if request.id in self._running:
            _, counted, since = self._running[request.id]
            tokens = request.generated
            self.kinds[request.kind].decoded(tokens - counted, since, now, ended)
            self._running[request.id] = request, tokens, now
