"""TTFT and TPOT that a request would see on an engine in a given state, from the engine's step cost.

`LatencyModel` steps through the prompts that are ahead, for many states at once; `Correction` learns from
what was measured how far that is off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.cost.laws.terms import HostTerms
from headgate.cost.model import StepCost

Floats = NDArray[np.float64]
MOST_STEPS = 24  # followed one by one; a longer queue goes on at the pace of the last
MOST_CHUNKS = 8  # that enter in one step; more count as that many
FACTORIALS = np.cumprod([1.0, *range(1, MOST_CHUNKS + 1)])
SEARCHES = 8  # halvings for the prompt tokens of a step that keeps a gap: to 32 of 8,192
MIXED, ALONE, GAP = "mixed", "alone", "gap"
# How prompts share steps with decodes, by policy. The others decide by more than the state of an engine says.
KINDS = {"mixed": MIXED, "sarathi": MIXED, "sarathi-spf": MIXED, "v0": ALONE, "sglang": ALONE, "keep": GAP}


class EngineStates(NamedTuple):
    running: Floats  # requests that are there and have a slot
    waiting: Floats  # requests that are there and have none
    kv: Floats  # share of KV memory in use
    prompt: Floats  # tokens of the request that comes
    cached: Floats  # share of them in the engine's prefix cache
    ahead: Floats  # prompt tokens of all requests there without a first token; below 0: not known


class Steady(NamedTuple):
    decode: Floats  # without prompts
    mean: Floats
    met: Floats  # the mean step that a request meets when it comes: long ones more often


class Traffic(NamedTuple):
    prompt: float  # tokens of a prompt that are computed
    output: float
    entering: float = 1.0  # requests that come for each that ends; 0: only what is there now


@dataclass(frozen=True)
class LatencyModel:
    """What one engine takes, if traffic goes on as the state says it is.

    A request waits for the rest of the step under way (and for one more step, composed already, where the
    engine composes ahead), then for steps that each take as many prompt tokens as fit, first come first
    served. Slots and KV that are missing come free as decodes end. A request decodes beside as many others
    as are there now. In a stationary engine as many prompts enter in each step as requests end,
    decodes / mean output; Poisson's law says which share of steps has some.
    """

    cost: StepCost
    slots: int
    budget: int
    kv_tokens: int
    kind: str = MIXED
    gap: float = 0.1  # seconds that a step may take with prompts in it, where `kind` is GAP
    ahead: bool = False  # the engine composes a step while the one before runs
    host: HostTerms | None = None

    def predict(self, states: EngineStates, traffic: Traffic) -> tuple[Floats, Floats]:
        mean_prompt, mean_output = max(traffic.prompt, 1.0), max(traffic.output, 1.0)
        todo = np.maximum(np.ceil(states.prompt * (1 - states.cached)), 1.0)
        known = states.ahead >= 0
        queued = states.waiting * mean_prompt
        queued = np.where(known, np.minimum(queued, states.ahead), queued)
        begun = np.where(known, states.ahead - queued, 0.0)  # prompts in steps that are composed
        prefilling = np.minimum(np.ceil(begun / mean_prompt), states.running)
        decodes = np.minimum(states.running - prefilling, self.slots)
        context = np.maximum(states.kv * self.kv_tokens - begun / 2, decodes)
        steady = self._steady(decodes, context, traffic)
        usual = steady.mean
        room = self._room(decodes, context)
        now = np.minimum(begun, room)
        spent = (states.running > 0) * self._under_way(states, steady, decodes, context, begun, room)
        begun = begun - now

        missing = np.maximum(decodes + prefilling + states.waiting + 1 - self.slots, 0.0)
        lacking = np.maximum(begun + queued + todo - (1 - states.kv) * self.kv_tokens, 0.0)
        leaving = decodes / mean_output  # per step
        wait = np.where(
            leaving > 0,
            np.maximum(missing, lacking / np.maximum(context / np.maximum(decodes, 1.0), 1.0))
            / np.maximum(leaving, 1e-12),
            0.0,
        )
        through, own = np.split(  # with all that is before it, and alone
            self._through(
                decodes=np.tile(decodes, 2),
                context=np.tile(context, 2),
                todo=np.tile(todo, 2),
                behind=np.tile(states.prompt - todo, 2),
                room=np.tile(room, 2),
                before=np.concatenate([begun + queued, 0 * todo]),
                prompt=mean_prompt,
            ),
            2,
        )
        ttft = spent + np.maximum(through, wait * usual + own)

        beside = np.minimum(decodes + prefilling + states.waiting + 1, self.slots)
        joined = (beside - decodes - 1) * mean_prompt
        held = np.minimum(context + joined + states.prompt + mean_output / 2, self.kv_tokens)
        return ttft, self._steady(beside, held, traffic).mean

    def _under_way(
        self,
        states: EngineStates,
        steady: Steady,
        decodes: Floats,
        context: Floats,
        begun: Floats,
        room: Floats,
    ) -> Floats:
        """Until a step can be composed for the new request. Half of the step under way is over.

        An engine that composes ahead has one more step to run. Prompts that fit one step are in either.
        """
        none = np.zeros_like(begun)
        count = np.maximum(np.ceil(begun / np.maximum(room, 1.0)), 1.0)
        first = self._seconds(decodes, context, np.minimum(begun, room), none, count)
        begins = np.where(begun > 0, first, np.where(states.ahead < 0, steady.met, steady.decode))
        if not self.ahead:
            return begins / 2
        decode = steady.decode
        either = (first**2 / 2 + 2 * first * decode + decode**2 / 2) / np.maximum(first + decode, 1e-12)
        second = np.where(states.ahead < 0, steady.mean, decode)
        return np.where(begun > room, 1.5 * first, np.where(begun > 0, either, begins / 2 + second))

    def _steady(self, decodes: Floats, context: Floats, traffic: Traffic) -> Steady:
        """Chunks that enter follow Poisson's law; those for which a step has no room fill idle steps."""
        room = self._room(decodes, context)
        prompt = max(traffic.prompt, 1.0)
        pieces = np.ceil(prompt / room)
        chunk, behind = prompt / pieces, (prompt - prompt / pieces) / 2
        fit = np.maximum(np.floor(room / chunk), 1.0)
        joining = decodes / max(traffic.output, 1.0) * traffic.entering * pieces
        # the share of steps with so many chunks
        counts = np.arange(MOST_CHUNKS + 1.0)
        poisson = np.exp(-joining) * joining ** counts[:, None] / FACTORIALS[:, None]
        poisson[-1] = np.maximum(1 - poisson[:-1].sum(0), 0.0)
        taken = np.minimum(counts[:, None], fit)
        entered = np.broadcast_to(counts[:, None], taken.shape).copy()
        entered[-1] = np.maximum(joining, counts[-1])
        shares = poisson * np.maximum(entered / np.maximum(taken, 1.0), 1.0)
        shares[1:] /= np.maximum(shares[1:].sum(0), 1.0)
        shares[0] = 1 - shares[1:].sum(0)
        # what each takes on the GPU, and on the host, which works on a step while the one before it runs
        gpu, host = self._parts(
            decodes=np.broadcast_to(np.maximum(decodes, 1.0), taken.shape).ravel(),
            context=np.broadcast_to(context, taken.shape).ravel(),
            prefill=(taken * chunk).ravel(),
            behind=((taken > 0) * behind).ravel(),
            prompts=taken.ravel(),
        )
        gpu, host = gpu.reshape(taken.shape), host.reshape(taken.shape)
        if self.kind == ALONE:
            gpu[1:] += gpu[0]
        pairs = np.maximum(gpu[None], host[None] - gpu[:, None])
        mean = np.einsum("in,jn,ijn->n", shares, shares, pairs)
        mean = np.maximum(mean, (shares * host).sum(0))
        squares = (shares * np.maximum(gpu, host) ** 2).sum(0)
        idle = decodes <= 0
        return Steady(
            decode=np.where(idle, 0.0, np.maximum(gpu[0], host[0])),
            mean=np.where(idle, 0.0, mean),
            met=np.where(idle, 0.0, squares / np.maximum(mean, 1e-12)),
        )

    def _through(
        self,
        decodes: Floats,
        context: Floats,
        todo: Floats,
        behind: Floats,
        room: Floats,
        before: Floats,
        prompt: float,
    ) -> Floats:
        spent, left = np.zeros_like(todo), before + todo
        last, taken = np.zeros_like(todo), np.ones_like(todo)
        for _ in range(MOST_STEPS):
            rows = np.flatnonzero(left > 0)
            if not len(rows):
                break
            running, read, still = decodes[rows], context[rows], left[rows]
            tokens = np.minimum(still, room[rows])
            own = np.clip(tokens - np.maximum(still - todo[rows], 0.0), 0.0, tokens)
            done = np.maximum(todo[rows] - still, 0.0)  # of its own prompt
            before_own = np.where(own > 0, behind[rows] + done, 0.0)
            others = (tokens - own) / prompt
            seconds = self._seconds(running, read, tokens, before_own, others + (own > 0))
            spent[rows] += seconds
            left[rows] = still - tokens
            last[rows], taken[rows] = seconds, tokens
            decodes[rows] = np.minimum(running + others, self.slots)
            context[rows] = np.minimum(read + tokens - own + running, self.kv_tokens)
        return spent + left / taken * last

    def _room(self, decodes: Floats, context: Floats) -> Floats:
        if self.kind == ALONE:
            return np.full_like(decodes, float(self.budget))
        room = np.maximum(self.budget - decodes * self.cost.width, 1.0)
        if self.kind == MIXED:
            return room
        low, high = np.ones_like(room), room
        none = np.zeros_like(room)
        for _ in range(SEARCHES):
            middle = (low + high) / 2
            fits = self._seconds(decodes, context, middle, none, none + 1) <= self.gap
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return np.floor(low)

    def _seconds(self, *shape: Floats) -> Floats:
        return np.maximum(*self._parts(*shape))

    def _parts(
        self, decodes: Floats, context: Floats, prefill: Floats, behind: Floats, prompts: Floats
    ) -> tuple[Floats, Floats]:
        """What a step takes on the GPU and on the host; the second is 0 where the cost has no host."""
        some = prefill > 0
        if self.kind == ALONE:
            decodes, context = np.where(some, 0.0, decodes), np.where(some, 0.0, context)
        gpu, host = self.cost.many(decodes, context, prefill, behind, prompts), self.host
        if host is None:
            return gpu, np.zeros_like(gpu)
        launch = host.constant + host.per_request * (decodes + some * np.maximum(prompts, 1.0))
        ungraphed = some & (decodes + prefill > host.graph) & (host.graph > 0)
        return gpu, launch + np.where(ungraphed, host.ungraphed, some * host.prompts)


# -- what was measured

FEATURES = 4
MOST_OFF = 4.0  # a correction is at most this factor, and an observation counts as no more
FORGET = 0.9995  # weight of the past with each observation: half after 1,400
PRIOR = 4.0  # observations that the card's own answer is worth


class Correction:
    """The logarithm of measured over predicted, as a line over the state of the engine.

    Ridge regression towards no correction, with forgetting: the card is believed until observations say
    otherwise, so there is no time of training. One observation moves it by a bounded amount.
    """

    def __init__(self) -> None:
        self._squares = PRIOR * np.eye(FEATURES)
        self._products = np.zeros(FEATURES)
        self._line: Floats = np.zeros(FEATURES)
        self.seen = 0
        self.error: float | None = None  # moving mean of |measured / corrected - 1|

    def factors(self, features: Floats) -> Floats:
        most = np.log(MOST_OFF)
        return np.asarray(np.exp(np.clip(features @ self._line, -most, most)), dtype=np.float64)

    def learn(self, features: Floats, predicted: Floats, measured: Floats) -> None:
        """Observations in the order in which they were made; all above zero."""
        if not len(features):
            return
        off = np.abs(measured / np.maximum(predicted * self.factors(features), 1e-12) - 1)
        most = np.log(MOST_OFF)
        logs = np.clip(np.log(measured / np.maximum(predicted, 1e-12)), -most, most)
        weights = FORGET ** np.arange(len(logs) - 1, -1, -1.0)
        kept = FORGET ** len(logs)
        prior = PRIOR * np.eye(FEATURES)
        self._squares = prior + kept * (self._squares - prior) + (features.T * weights) @ features
        self._products = kept * self._products + features.T @ (weights * logs)
        self._line = np.linalg.solve(self._squares, self._products).astype(np.float64)
        self.seen += len(logs)
        mean = float(np.minimum(off, MOST_OFF) @ weights / weights.sum())
        before = mean if self.error is None else self.error
        self.error = before + max(1 - kept, len(logs) / self.seen) * (mean - before)


def features_of(states: EngineStates, slots: int, budget: int) -> Floats:
    """A constant, how full slots and memory are, and how much is queued; each from 0 to 1."""
    busy = np.minimum(states.running / slots, 1.0)
    queued = np.minimum(np.maximum(states.ahead, 0.0) / budget + states.waiting / slots, 1.0)
    return np.column_stack([np.ones_like(busy), busy, states.kv, queued])
