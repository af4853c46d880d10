"""Prefill and decode on different engines, in a fixed split (DistServe, Zhong et al. 2024)."""

from __future__ import annotations

from headgate.core.errors import InputError
from headgate.core.fleet import DECODE, PREFILL, STAY, Fleet, Move, RoutePolicy, Routing, Stage
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.methods.balance.assigned import Lines, Loads


class Split(RoutePolicy):
    """The first `prefill` engines do prompts only, the others outputs only; KV is handed over in between.

    A prompt goes to the prefill engine with the fewest prompt tokens to do, an output to the decode engine
    with the fewest requests, both at once: engines queue. The split never changes; what it should be is the
    planner's business (`planners.splitting`).
    """

    sends_at_once = True

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
        self._prompts = Lines(makers, lambda replica: replica.idle)
        self._decodes = Lines(users, lambda replica: replica.seats > 0)
        self._tokens, self._outputs = Loads(makers), Loads(users)
        self._adopted = False
        self._prompt_at: dict[int, int] = {}
        self._decode_at: dict[int, int] = {}

    def roles(self, engines: int) -> tuple[str, ...]:
        """The first prefill, the others decode."""
        return (PREFILL,) * self.prefill + (DECODE,) * (engines - self.prefill)

    def arrived(self, request: Request, now: float) -> None:
        """Its prompt is given to an engine."""
        engine = self._tokens.least()
        self._tokens.add(engine, request.prompt)
        self._prompt_at[request.id] = engine
        self._prompts.give(request.id, engine)

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """Its output is given to an engine."""
        self._prompt_ended(request)
        self._prompts.touch(replica)
        engine = self._outputs.least()
        self._outputs.add(engine, 1)
        self._decode_at[request.id] = engine
        self._decodes.give(request.id, engine)

    def finished(self, request: Request, replica: int, now: float) -> None:
        """It no longer counts as load."""
        self._prompt_ended(request)
        self._decode_ended(request)

    def left(self, request: Request, now: float, how: End) -> None:
        """Nor does a request that left."""
        self._prompts.drop(request.id)
        self._decodes.drop(request.id)
        self._prompt_ended(request)
        self._decode_ended(request)

    def route(self, fleet: Fleet) -> Routing:
        """Decodes first, so that prefill engines get rid of their KV."""
        if not self._adopted:
            self._adopt(fleet)
        found, stage = self._decodes.next(fleet), Stage.DECODE
        if found is None:
            found, stage = self._prompts.next(fleet), Stage.PREFILL
        return STAY if found is None else Routing((Move(*found, stage),))

    def _adopt(self, fleet: Fleet) -> None:
        """Requests that waited before this router took over; it was notified of all others."""
        self._adopted = True
        for stranger in self._prompts.strangers(fleet.queues.values()):
            self.arrived(stranger, fleet.now)
        for stranger in self._decodes.strangers([fleet.handoff]):
            self.prefilled(stranger, 0, fleet.now)

    def _prompt_ended(self, request: Request) -> None:
        engine = self._prompt_at.pop(request.id, None)
        if engine is not None:
            self._tokens.add(engine, -request.prompt)
            self._prompts.touch(engine)

    def _decode_ended(self, request: Request) -> None:
        engine = self._decode_at.pop(request.id, None)
        if engine is not None:
            self._outputs.add(engine, -1)
            self._decodes.touch(engine)
