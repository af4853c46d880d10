"""Prefill and decode on different engines, in a fixed split (DistServe, Zhong et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError
from headgate.core.fleet import (
    ANY,
    CLOSED,
    DECODE,
    PREFILL,
    STAY,
    Fleet,
    Move,
    Replica,
    RoutePolicy,
    Routing,
    Stage,
)
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.methods.balance.balance import Assigned, Loads, one_move

WHOLE: Final = Stage.WHOLE
DECODE_ONLY: Final = Stage.DECODE


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Split(RoutePolicy):
    """The first `prefill` engines do prompts only, the others outputs only; KV is handed over in between.

    A prompt goes to the prefill engine with the fewest prompt tokens to do, an output to the decode engine
    with the fewest requests, both at once: engines queue. The split never changes by itself; what it should
    be is the planner's business (`staffing`). Engines are found by their roles where these change.
    While one engine alone is up it does both, and requests are sent whole: there is nowhere to hand KV to.
    """

    sends_at_once = True
    hands_over = True

    def __init__(self, engines: int, prefill: int) -> None:
        if not 0 < prefill < engines:
            raise InputError(
                f"router split: {prefill} of {engines} engines for prompts; both pools need an engine, give "
                f"1 to {engines - 1}"
                if engines > 1
                else "router split: 1 engine cannot be split; give at least 2"
            )
        self.prefill = prefill
        makers, users = range(prefill), range(prefill, engines)
        self._makers: Sequence[int] = makers
        self._users: Sequence[int] = users
        self._prompts = Assigned(makers)
        self._decodes = Assigned(users, decodes=True)
        self._tokens, self._outputs = Loads(makers), Loads(users)
        self._prompt_at: dict[int, tuple[int, int]] = {}  # engine, and the tokens it was given with
        self._decode_at: dict[int, int] = {}
        self._whole: set[int] = set()  # of those in `_prompt_at`: their output stays at that engine
        self._alone = False  # one engine is up
        self._wished: tuple[tuple[int, str], ...] = ()  # roles to ask for
        self._roles_before: dict[int, str] = {}  # of engines that did both since

    def roles(self, engines: int) -> tuple[str, ...]:
        if engines == 1:
            return (ANY,)
        return (PREFILL,) * self.prefill + (DECODE,) * (engines - self.prefill)

    def arrived(self, request: Request, now: float) -> None:
        self._give_prompt(request)

    def returned(self, request: Request, now: float) -> None:
        self.left(request, now, End.ABORTED)
        self._give_prompt(request, first=True)

    def moved(self, request: Request, move: Move, now: float) -> None:
        """Sent whole it asks for no decode place. The driver may have sent one that still waits here."""
        id, engine, stage = move
        if stage is not DECODE_ONLY:
            self._prompts.drop(id)
            if id not in self._prompt_at or self._prompt_at[id][0] != engine:
                self._prompt_ended(request)
                self._weigh_prompt(request, engine)
            if stage is WHOLE:
                self._whole.add(id)
            return
        self._decodes.drop(id)
        if self._decode_at.get(id) != engine:
            self._decode_ended(request)
            self._weigh_decode(request, engine)
            self._give_again(())

    def passed_over(self, request: Request, now: float) -> None:
        self._prompts.give(request, self._prompt_at[request.id][0], first=True)

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        self._prompts.touch(replica)
        if request.id in self._prompt_at:
            whole = request.id in self._whole
            self._prompt_ended(request)
            if whole:
                self._weigh_decode(request, replica)
            else:
                self._give_decode(request)

    def finished(self, request: Request, replica: int, now: float) -> None:
        self._prompt_ended(request)
        self._decode_ended(request)

    def left(self, request: Request, now: float, how: End) -> None:
        self._prompts.drop(request.id)
        self._decodes.drop(request.id)
        self._prompt_ended(request)
        self._decode_ended(request)

    def route(self, fleet: Fleet) -> Routing:
        """Decodes first, so that prefill engines get rid of their KV."""
        found, stage = self._decodes.next(fleet), DECODE_ONLY
        if found is None:
            found, stage = self._prompts.next(fleet), WHOLE if self._alone else Stage.PREFILL
        if found is not None:
            return one_move(*found, stage)
        if not self._wished:
            return STAY
        roles, self._wished = self._wished, ()
        return Routing(roles=roles)

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
        self._look(fleet)
        for id, place in fleet.places.items():
            if id in fleet.handoff:
                self._give_decode(place.request)
            elif place.decoding:
                self._weigh_decode(place.request, place.replica)
            else:
                self._weigh_prompt(place.request, place.replica)
                if place.stage is WHOLE:
                    self._whole.add(id)
        for queue in fleet.queues.values():
            for request in queue.values():
                self._give_prompt(request)

    def engines_changed(self, fleet: Fleet) -> None:
        self._look(fleet)
        for request in self._prompts.clear_up(self._makers):
            self._prompt_ended(request)
            self._give_prompt(request)
        self._give_again(self._users)

    def _look(self, fleet: Fleet) -> None:
        """Which prefill and which decode? Without any, those that can; where none is open, wait for them."""
        replicas = fleet.replicas
        self._makers = _open(replicas, PREFILL, lambda each: each.room.prompts)
        self._users = _open(replicas, DECODE, lambda each: each.room.decodes)
        self._tokens.only(self._makers, len(replicas))
        self._outputs.only(self._users, len(replicas))
        up = [each for each in replicas if each.room != CLOSED]
        self._alone = len(up) == 1
        self._wished = self._roles_for(up)

    def _roles_for(self, up: Sequence[Replica]) -> tuple[tuple[int, str], ...]:
        """An engine alone must do both, and has its role again when another is there.

        What it was is forgotten when it is that again: a wish may be out of date before it is granted.
        """
        before = self._roles_before
        for each in up:
            if each.role != ANY:
                before.pop(each.id, None)
        if len(up) == 1:
            each = up[0]
            if each.room.prompts and each.room.decodes:
                return ()
            if each.role != ANY:
                before[each.id] = each.role
            return ((each.id, ANY),)
        return tuple((each.id, before[each.id]) for each in up if each.id in before)

    def _give_prompt(self, request: Request, first: bool = False) -> None:
        engine = self._tokens.least()
        self._weigh_prompt(request, engine)
        self._prompts.give(request, engine, first)

    def _weigh_prompt(self, request: Request, engine: int) -> None:
        self._tokens.add(engine, request.prompt)
        self._prompt_at[request.id] = engine, request.prompt

    def _give_decode(self, request: Request) -> None:
        engine = self._outputs.least()
        self._weigh_decode(request, engine)
        self._decodes.give(request, engine)

    def _give_again(self, keep: Sequence[int]) -> None:
        for request in self._decodes.clear_up(keep):
            self._decode_ended(request)
            self._give_decode(request)

    def _weigh_decode(self, request: Request, engine: int) -> None:
        self._outputs.add(engine, 1)
        self._decode_at[request.id] = engine

    def _prompt_ended(self, request: Request) -> None:
        engine, tokens = self._prompt_at.pop(request.id, (None, 0))
        self._whole.discard(request.id)
        if engine is not None:
            self._tokens.add(engine, -tokens)
            self._prompts.touch(engine)

    def _decode_ended(self, request: Request) -> None:
        engine = self._decode_at.pop(request.id, None)
        if engine is not None:
            self._outputs.add(engine, -1)
            self._decodes.touch(engine)


def _open(replicas: Sequence[Replica], role: str, takes: Callable[[Replica], int]) -> Sequence[int]:
    mine = [each.id for each in replicas if each.role == role and takes(each)]
    return mine or [each.id for each in replicas if takes(each)] or range(len(replicas))


def best_split(engines: int, prompt_seconds: float, output_seconds: float) -> int:
    """The number of prefill engines with the highest rate, min(r_P/T_P, r_D/T_D); of equals the fewest.

    `prompt_seconds` is what one request's prompt takes of a prefill engine, T_P of arXiv 2508.01002,
    `output_seconds` what its output takes of a decode engine whose steps are full.
    """
    if engines < 2:
        raise InputError(f"{engines} engine cannot be split into prefill and decode; give at least 2")
    if prompt_seconds <= 0 and output_seconds <= 0:
        raise InputError("neither prompts nor outputs take any time; the split of the engines is undefined")
    rates: list[float] = []
    for prefill in range(1, engines):
        prompts = prefill / prompt_seconds if prompt_seconds > 0 else inf
        rates.append(min(prompts, (engines - prefill) / output_seconds if output_seconds > 0 else inf))
    return 1 + rates.index(max(rates))
