"""SGLang's own scheduling as a policy: prefill first, admission by an estimate of outputs, retraction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from headgate.core.errors import InputError, unknown
from headgate.core.plan import ALL, NONE, Plan, Until
from headgate.core.policy import BatchPolicy, End, Steps
from headgate.core.request import Request
from headgate.core.view import View
from headgate.methods.mixed.mixed import NO_PLACE_LEFT, NONE_WAITS

INITIAL, LEAST, DECAY = 0.7, 0.14, 600  # new_token_ratio: at first, its floor as a share, steps down to it
AFTER_RETRACTION = 20  # decode steps that the requests left over should have
MATCHED = 128  # requests in the queue beyond which `lpm` is `fcfs`
ORDERS = ("fcfs", "lpm")
ONE_MUST_MOVE = Plan(ALL, until=Until(arrivals=1, finishes=1))


class Flight(NamedTuple):
    """The step on its way while the next one is composed (SGLang's overlap)."""

    decodes: bool = False  # each decode gets a token of it
    prefill: bool = False
    done: tuple[int, ...] = ()  # prompts that it completes


class NextState(NamedTuple):
    full: bool = False
    rest: int = 0
    flight: Flight = Flight()
    ratio: float | None = None  # where a retraction sets it


NOTHING = Flight()


class PromptStep:
    """The prompts of a step, and what is left of tokens and of the KV that the estimate leaves free."""

    def __init__(self, page: int, chunk: int, prefill: int, room: float, full: bool) -> None:
        self.page, self.chunk, self.prefill, self.room = page, chunk, prefill, room
        self.full = full  # no request is tried until one leaves the batch
        self.cut = False  # the last prompt goes on in the next step
        self.prompts: list[int] = []
        self.tokens = self.pages = 0

    def add(self, request: Request, tokens: int, reserved: int) -> None:
        """So many tokens of a prompt; the output counts with its last piece only."""
        done = request.prompt + request.generated - request.todo
        charge = -(-tokens // self.page) * self.page
        self.cut = tokens < request.todo
        self.prompts.append(request.id)
        self.tokens += tokens
        self.pages += -(-(done + tokens) // self.page) - -(-done // self.page)
        self.chunk -= charge
        self.prefill -= charge
        self.room -= charge + self.page + (0 if self.cut else reserved)

    def first_piece(self, request: Request) -> int:
        """Tokens of a new prompt: all, or as many as end at a page."""
        page, tokens = self.page, request.todo
        if -(-tokens // page) * page <= self.chunk:
            return tokens
        done = request.prompt + request.generated - tokens
        return (done + self.chunk // page * page) // page * page - done


class SGLang(BatchPolicy):
    """Prompts before decodes, never both in a step, unless `mixed_chunk`; as SGLang without a plug-in.

    A prompt enters if prompt, its most output tokens and a page fit beside what the running requests may
    still produce, of which only a share counts: `new_token_ratio`, which falls with every decode step and is
    set anew by a retraction. A first piece of a prompt ends at a page, and every prompt is charged in whole
    pages (`block` of the engine). Where decodes find no KV, the request with the shortest output is
    retracted, and goes to the end of the queue.

    Parameters: docs/policies/published.md has SGLang's flag of each. Prompts enter only when
    `min_free_slots_delay` slots are free; 4 is `eb:refill=4` while requests queue. There is no interval while
    fewer than `interval_min_bs` requests decode. Of an output `clip` tokens are counted at most, and of
    requests that name no max_tokens so many.

    Source: `Scheduler._get_new_batch_prefill_raw`, `PrefillAdder` and `ScheduleBatch.retract_decode` of
    SGLang 0.5.23. We differ: (a) an idle engine takes a prompt whose most output does not fit, which SGLang
    would never admit; (b) `lpm` goes by what was last looked up, and knows nothing of prompts alike in the
    queue. Left out: priorities, `ignore_eos`, prefill without chunks, sliding windows and states of hybrid
    models.

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=64)
        >>> run = headgate.simulate(engine, "sglang", headgate.Workload.of([512] * 200, [64] * 200))
        >>> bool(((run.steps["decodes"] > 0) & (run.steps["prefill"] > 0)).any())
        False
    """

    own_scheduling_of = "SGLang"  # which needs no policy of ours for it

    def __init__(
        self,
        slots: int,
        budget: int,
        max_prefill_tokens: int = 16384,
        mixed_chunk: bool = False,
        min_free_slots_delay: int = 0,
        prefill_decode_interval: int = 0,
        interval_min_bs: int = 0,
        conservativeness: float = 1.0,
        clip: int = 4096,
        order: str = "fcfs",
    ) -> None:
        counts = {"slots": slots, "budget": budget, "max_prefill_tokens": max_prefill_tokens, "clip": clip}
        for name, value in counts.items():
            if value < 1:
                raise InputError(f"sglang: {name}={value}; it must be at least 1")
        if min(min_free_slots_delay, prefill_decode_interval, interval_min_bs) < 0:
            raise InputError("sglang: a delay or an interval below 0; give 0 for none")
        if not conservativeness > 0:
            raise InputError(f"sglang: conservativeness={conservativeness}; it must be above 0")
        if order not in ORDERS:
            raise unknown("order of sglang", order, ORDERS)
        self.slots, self.budget, self.most_prefill = slots, budget, max_prefill_tokens
        self.mixed, self.clip, self.order = mixed_chunk, clip, order
        self.min_free = min(min_free_slots_delay, slots) if min_free_slots_delay > 1 else 0
        self.interval, self.interval_min_bs = prefill_decode_interval, interval_min_bs
        self._first = min(INITIAL * conservativeness, 1.0)
        self._least = self._first * LEAST
        self._from, self._decayed = self._first, 0  # the ratio at its last setting, decode steps since then
        self._queue: dict[int, None] = {}  # retracted requests last
        self._here = 0  # requests that wait or run
        self._full = False
        self._rest = 0  # decode steps still due before the next prompts
        self._idle_since = -inf
        self._flight = NOTHING
        self._next = NextState()

    @property
    def ratio(self) -> float:
        """The share of what running requests may still produce that is kept free."""
        decayed = self._decayed + self._late_decay
        if decayed <= 0:  # also below the floor, after a retraction
            return self._from
        return max(self._from - decayed * (self._first - self._least) / DECAY, self._least)

    @property
    def _late_decay(self) -> int:
        """Decode steps count when they are composed, and are told when their tokens are seen."""
        return int(self._flight.decodes and not self._flight.prefill)

    def _seen(self, request: Request) -> int:
        return request.generated - (self._flight.decodes or request.id in self._flight.done)

    # -- what it is told

    def arrived(self, request: Request, now: float) -> None:
        if not self._here and now > self._idle_since:
            self._from, self._decayed, self._rest = self._first, 0, 0
        self._here += 1
        self._queue[request.id] = None

    def admitted(self, request: Request, now: float) -> None:
        self._queue.pop(request.id, None)

    def evicted(self, request: Request, now: float) -> None:
        self._queue[request.id] = None
        self._full = False

    def finished(self, request: Request, now: float, how: End) -> None:
        if request.id in self._queue:
            del self._queue[request.id]
        else:
            self._full = False
        self._here -= 1
        if not self._here:
            self._idle_since, self._flight = now, NOTHING

    def stepped(self, steps: Steps) -> None:
        if not steps.prefill:
            self._decayed += len(steps.ends)

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        self._full, self._rest, flight, ratio = self._next
        if ratio is not None:  # the step of a retraction takes nothing off
            self._from, self._decayed = ratio, -1 - self._late_decay
        self._flight = flight

    def gauges(self) -> Mapping[str, float]:
        return {"new_token_ratio": self.ratio if self._here else self._first}

    # -- what it decides

    def plan(self, view: View) -> Plan:
        decodes = len(view.decoding)
        rest = self._rest if decodes and decodes >= self.interval_min_bs else 0
        full = self._full and decodes > 0
        if self._rest and not (decodes or self.interval_min_bs) and self._flight.prefill:
            self._next = NextState()
            return Plan(NONE)  # SGLang waits even where nothing decodes, and the step on its way ends
        step = None if rest else self._admissions(view, full)
        if step is not None and step.prompts:
            together = self.mixed and decodes > 0 and not self._short(view, step.pages)
            # A batch that was empty, went into the mixed one or loses a half-done prompt is open again.
            full = step.full and decodes > 0 and not (together or step.cut)
            done = tuple(step.prompts[:-1] if step.cut else step.prompts)
            flight = Flight(together, True, done) if view.limits.ahead else NOTHING
            self._next = NextState(full, self.interval, flight)
            return Plan(NONE if decodes and not together else ALL, tuple(step.prompts), chunk=step.tokens)
        full = step.full if step is not None else full
        short = self._short(view)
        staying = any(request.generated < request.limit for request in view.decoding.values())
        if short and any(request.generated >= request.limit for request in view.decoding.values()):
            self._next = NextState(rest=max(rest - 1, 0))
            return Plan(NONE)  # KV comes free when the tokens on their way are seen
        retracted, ratio = self._retractions(view) if short else ((), None)
        flight = Flight(decodes=staying) if view.limits.ahead else NOTHING
        self._next = NextState(full and not retracted, max(rest - 1, 0), flight, ratio)
        if rest or retracted:
            return Plan(ALL, evict=retracted)
        if not view.waiting and not view.prefilling:
            return NONE_WAITS
        return NO_PLACE_LEFT if full or self.order == "fcfs" else ONE_MUST_MOVE

    def _admissions(self, view: View, full: bool) -> PromptStep:
        """The half-done prompt, then those of the queue, as far as tokens, slots and the estimate go."""
        decodes = len(view.decoding)
        slots = min(self.slots, view.limits.running) - decodes
        beside = decodes if self.mixed else 0
        step = PromptStep(view.limits.block, self.budget - beside, self.most_prefill - beside, 0.0, full)
        if not view.prefilling and (
            full or not view.waiting or (decodes and slots < self.min_free) or slots <= 0
        ):
            step.full = full or slots <= 0
            return step
        unseen = sum(min(_most(r, view) - self._seen(r), self.clip) for r in view.decoding.values())
        step.room = view.kv_free - beside - unseen * self.ratio
        for request in view.prefilling.values():
            # Not cut at a page; where nothing is left by the estimate it runs on, to give its KV back.
            most = min(step.chunk, int(step.room))
            tokens = min(request.todo, most if most > 0 else step.chunk)
            if tokens <= 0 or step.cut:
                break
            step.add(request, tokens, min(_most(request, view), self.clip))
        if step.prompts or not view.prefilling:
            self._enter(view, step, slots)
        return step

    def _enter(self, view: View, step: PromptStep, slots: int) -> None:
        """New prompts. The one that does not fit holds up those behind it; an idle engine takes any."""
        for request in () if step.cut else self._waiting(view):
            if step.room > 0 and min(step.chunk, step.prefill) <= 0:
                return
            step.full = step.full or len(step.prompts) >= slots
            if step.full:
                return
            idle, most = not step.prompts and not view.decoding, _most(request, view)
            need = request.room + min(most - request.generated, self.clip) + step.page
            if need >= step.room and not idle:
                step.full = True
                return
            tokens = step.first_piece(request)
            if tokens <= 0 and not idle:
                return
            step.room -= request.room - request.todo
            step.add(request, tokens if tokens > 0 else min(request.todo, step.chunk), min(most, self.clip))
            if step.cut:
                return
            if step.room <= 0:
                step.full = True
                return

    def _waiting(self, view: View) -> Iterator[Request]:
        waiting = [view.waiting[id] for id in self._queue if id in view.waiting]
        if self.order == "lpm" and len(waiting) <= MATCHED:
            waiting.sort(key=lambda request: request.todo - request.prompt - request.generated)
        return iter(waiting)

    def _short(self, view: View, taken: int = 0) -> bool:
        """Whether the decodes find no KV for a token each beside so many pages."""
        page = view.limits.block
        free = view.kv_free // page - taken
        return len(view.decoding) > free and sum(_due(r, page) for r in view.decoding.values()) > free

    def _retractions(self, view: View) -> tuple[tuple[int, ...], float | None]:
        """Which requests go so that the others decode, and the ratio from then on."""
        page = view.limits.block
        left = sorted(view.decoding.values(), key=lambda r: (self._seen(r), -r.prompt), reverse=True)
        free = view.kv_free // page
        due = sum(_due(r, page) for r in left)
        out: list[int] = []
        while len(left) > 1 and (not out or due > free):
            request = left.pop()
            out.append(request.id)
            due -= _due(request, page)
            free += -(-(request.prompt + request.generated - 1) // page)
        made = sum(self._seen(r) for r in left) + AFTER_RETRACTION * len(left)
        ratio = min(1.0, made / (sum(_most(r, view) for r in left) + 1))
        return tuple(out), ratio if out else None


def _most(request: Request, view: View) -> int:
    """Output tokens that it may have: its own limit, or all the KV."""
    return max(min(request.limit, view.kv_total - request.prompt - 2), 0)


def _due(request: Request, page: int) -> int:
    """1 where its next token begins a page; one whose last token is on its way needs none."""
    return int(request.generated < request.limit and (request.prompt + request.generated - 1) % page == 0)
