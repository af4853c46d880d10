"""Counts what happens in an engine, in O(1) per event, for metrics and the log."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from headgate.core.build import mypyc_attr, quick
from headgate.core.plan import Plan
from headgate.core.policy import End, Steps
from headgate.core.request import Request
from headgate.live.engine.events import CAUSES, RAISED, LiveObserver

STATES = ("waiting", "prefilling", "decoding")
WAITING, PREFILLING, DECODING = range(3)
KINDS = ("mixed", "decode", "prefill", "empty")  # of steps
IDLE = "idle"
KEEP = "auto", "keep"  # two names of one policy
LONGEST_NAME = 64  # characters of a gauge's name
MOST_GAUGES = 256  # of one policy


class Times(NamedTuple):
    """How long something took, and how often."""

    kind: str
    seconds: float
    steps: int = 1


@mypyc_attr(allow_interpreted_subclasses=True)
class Tally(LiveObserver):
    """What has happened so far. Reads nothing but its hooks; another thread may read its numbers.

    A *phase* is a run of steps of one kind. A *stall* is a gap between two tokens of a decode in which the
    engine ran prompts only, or other decodes: what holding decodes costs their readers.
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
        self.plans = self.evictions = self.rescues = self.renewals = 0
        self.kv = 0
        self.gauges: Mapping[str, float] = {}
        self.counts: Mapping[str, int] = {}  # the driver's own; only it knows of empty steps
        self.states = [0, 0, 0]
        self.longest_stall = 0.0
        # Taken by the thread that shows them; the oldest go where there is none.
        self.step_times: deque[Times] = deque(maxlen=100_000)
        self.phase_times: deque[Times] = deque(maxlen=100_000)
        self.stalls: deque[float] = deque(maxlen=100_000)
        self._state: dict[int, int] = {}  # by request
        self._thrown: dict[int, int] = {}  # KV tokens by request that was evicted
        self._phase = 0.0  # seconds of the present one
        self._token = 0.0  # since when decodes have had no token
        self._stalled = False

    @property
    def mode(self) -> str:
        """What decides, and where the policy has two ways, which of them."""
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

    # -- requests

    def arrived(self, request: Request, now: float) -> None:
        self._move(request.id, WAITING)

    def admitted(self, request: Request, now: float) -> None:
        """It has a slot; what the prefix cache has of it is not computed, and was not lost."""
        if request.evictions:
            found_again = self._thrown.get(request.id, 0) - request.wasted
            if found_again > 0:
                self.lost["eviction"] -= found_again
                self._thrown[request.id] = request.wasted
        elif request.cached:
            self._cached += request.cached
        self._move(request.id, PREFILLING)

    def prefilled(self, request: Request, now: float) -> None:
        if not self.states[DECODING]:  # no other waits for a token
            self._token, self._stalled = now, False
        self._move(request.id, DECODING)

    def resumed(self, request: Request, now: float) -> None:
        """It was left out by name; its gap ends with the step that begins now."""
        if request.last_token is not None:
            self._stall(now - request.last_token)

    def evicted(self, request: Request, now: float) -> None:
        """It waits again, and what was computed for it is lost."""
        self.evictions += 1
        self.lost["eviction"] += request.wasted - self._thrown.get(request.id, 0)
        self._thrown[request.id] = request.wasted
        self._move(request.id, WAITING)

    def finished(self, request: Request, now: float, how: End) -> None:
        self.left[how._value_] += 1  # `value` is a function of the enum
        self._thrown.pop(request.id, None)
        state = self._state.pop(request.id, None)
        if state is not None:
            self.states[state] -= 1

    def _move(self, id: int, state: int) -> None:
        before = self._state.get(id)
        if before is not None:
            self.states[before] -= 1
        self._state[id] = state
        self.states[state] += 1

    # -- steps

    def stepped(self, steps: Steps) -> None:
        start, ends, decodes, _, prefill, _, kv = steps
        kind = ("mixed" if decodes else "prefill") if prefill else "decode"
        count, end = len(ends), ends[-1]
        took = end - start
        if kind != self.kind:
            self._end_phase()
            self.kind = kind
        self._phase += took
        self._decoded += decodes * count
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
            if self._stalled:
                self._stall(ends[0] - self._token)
                self._stalled = False
            self._token = end
        elif self.states[DECODING]:
            self._stalled = True

    def _end_phase(self) -> None:
        if self._phase:
            self.phase_times.append(quick(Times, (self.kind, self._phase, 1)))
        self._phase = 0.0

    def _stall(self, seconds: float) -> None:
        self.stalls.append(seconds)
        if seconds > self.longest_stall:
            self.longest_stall = seconds

    # -- the policy

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

    def wasted(self, tokens: int, now: float) -> None:
        self.lost["gone"] += tokens


def numbers(gauges: object) -> dict[str, float]:
    """A policy's own numbers that can be shown, by name.

    A policy is the user's code and may show anything: what is no number is left out.
    """
    if not isinstance(gauges, Mapping):
        return {}
    shown: dict[str, float] = {}
    for name, value in list(gauges.items())[:MOST_GAUGES]:
        try:
            shown[str(name)[:LONGEST_NAME]] = float(value)
        except Exception:  # float() of the user's own type may raise anything
            continue
    return shown
