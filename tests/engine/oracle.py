"""Runs a scheduler against a worker that checks everything: vLLM's engine core, without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from connector import Load
from memory import Memory, Wrong
from runners import RUNNERS
from schedulers import EngineShape, free_blocks, request, scheduler
from traffic import Comer, Traffic
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

MOST_STEPS = 6000
SECONDS = 1.0  # of the made-up clock, per step


class Grammar:
    """Stands for a structured output that is compiled in the background."""

    def __init__(self) -> None:
        self.grammar: object | None = None
        self.reasoning_ended = None


class Known(NamedTuple):
    """What the worker had done before a step."""

    speakers: frozenset[str]  # they have brought a token since they were last admitted
    computed: dict[str, int]


class Oracle:
    """One engine, one traffic; `run` serves it to the end or says what went wrong.

    `look` is called after every step and may raise what it does not like.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        shape: EngineShape,
        traffic: Traffic,
        look: Callable[[Oracle], None] = lambda oracle: None,
    ) -> None:
        self.scheduler = scheduler
        self.shape = shape
        self.traffic = traffic
        self.look = look
        self.truths = {comer.name: comer.truth(shape.longest) for comer in traffic.comers}
        self.said: dict[str, list[int]] = {comer.name: [] for comer in traffic.comers}
        self.ended: dict[str, str] = {}
        pool = scheduler.kv_cache_manager.block_pool
        self.memory = Memory(shape.blocks, shape.block, lambda block: pool.blocks[block].ref_cnt)
        self.runner = RUNNERS[shape.runner](shape, self.memory, self.truths)
        self.step = 0
        self.empty = 0
        self.requests: dict[str, Request] = {}
        self._coming = deque(sorted(traffic.comers, key=lambda comer: comer.step))
        self._here: list[Comer] = []
        self._loading: dict[str, tuple[int, Load]] = {}  # the step at which it is here
        self._flying: deque[tuple[Any, Any, Known]] = deque()  # composed, tokens not yet told
        self.free_before = shape.blocks  # when the newest step was composed
        if hasattr(scheduler, "_headgate"):
            scheduler._headgate.clock = scheduler._headgate_books.wall = self.clock
            scheduler._headgate.origin = 0.0

    def clock(self) -> float:
        """Seconds on the made-up clock."""
        return self.step * SECONDS

    def run(self) -> Oracle:
        """Serve everybody, then look what is left behind."""
        while self._coming or len(self.ended) < len(self.said) or self._flying or self._loading:
            self._outside()
            self._step()
            self.look(self)
            self.step += 1
            if self.step > MOST_STEPS:
                raise Wrong(f"hangs: {sorted(self.said.keys() - self.ended.keys())} unserved")
        if self.scheduler.has_requests():  # only to tell the worker who is finished
            self._step()
        self._nothing_left()
        return self

    # -- what comes from outside ------------------------------------------------------------------

    def _outside(self) -> None:
        """Arrivals, hang-ups between two steps, what the operator does."""
        while self._coming and self._coming[0].step <= self.step:
            self._arrive(self._coming.popleft())
        self._hang_up(midway=False)
        if self.step in self.traffic.pauses:
            self.scheduler._pause_state = self.traffic.pauses[self.step]
        if self.step in self.traffic.resets and self.shape.caching:
            self.scheduler.reset_prefix_cache(reset_running_requests=self.traffic.resets[self.step])
        for comer in self._here:
            if comer.grammar and self.step >= comer.step + comer.grammar:
                self.requests[comer.name].structured_output_request.grammar = self

    def _arrive(self, comer: Comer) -> None:
        made = request(
            comer.name,
            comer.prompt,
            comer.limit,
            self.shape.block,
            stops=comer.stops,
            arrival=self.clock() + len(self.requests) / 1024,  # no two at the same time
            priority=comer.priority,
            adapter=comer.adapter,
        )
        if comer.grammar:
            made.structured_output_request = Grammar()
            made.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.requests[comer.name] = made
        if comer.remote:
            self.scheduler.connector.there[comer.name] = comer.remote, comer.late > 0
        self._here.append(comer)
        self.scheduler.add_request(made)

    def _hang_up(self, midway: bool) -> None:
        gone = [
            comer.name
            for comer in self._here
            if comer.hangs_up is not None
            and comer.hangs_up <= self.step
            and comer.midway == midway
            and comer.name not in self.ended
        ]
        if gone:
            self.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            self.ended |= dict.fromkeys(gone, "abort")

    # -- one step, as EngineCore does it --------------------------------------------------------------

    def _step(self) -> None:
        if self.scheduler.has_requests():
            self.free_before = free_blocks(self.scheduler)
            output = self.scheduler.schedule(self.step in self.traffic.throttled)
            self.empty += not output.num_scheduled_tokens
            self._within_limits(output)
            known = self._known_without(output)
            came = self._transfers() if self.shape.connector else None
            blocks = self.scheduler.kv_cache_manager.get_block_ids
            self.memory.tables = {n: (self.truths[n], blocks(n)[0]) for n in self.scheduler.requests}
            result = self.runner.execute(output)
            result.kv_connector_output = came
            if self.shape.drafts and self.shape.ahead:
                self._draft(output)
            self._flying.appendleft((output, result, known))
            self._same_blocks(output)
            ran = bool(output.num_scheduled_tokens)
            if self.shape.ahead and len(self._flying) < 2 and (ran or self.scheduler.has_requests()):
                return
        elif not self._flying:
            return
        output, result, _ = self._flying.pop()
        self._hang_up(midway=True)
        self._deliver(self.scheduler.update_from_output(output, result))
        if self.shape.drafts and not self.shape.ahead:
            self._draft(output)

    def _transfers(self) -> KVConnectorOutput | None:
        """KV from elsewhere: some is there before the step runs, the rest arrives some steps later."""
        late = {comer.name: comer.late for comer in self._here}
        for load in self.scheduler.connector.take():
            if load.late:
                self._loading[load.name] = self.step + late[load.name], load
            else:
                self._load(load)
        here = [name for name, (step, _) in self._loading.items() if step <= self.step]
        for name in here:
            self._load(self._loading.pop(name)[1])
        return KVConnectorOutput(finished_recving=set(here)) if here else None

    def _load(self, load: Load) -> None:
        self.memory.load(self.truths[load.name], load.blocks, load.first, load.count)

    def _draft(self, output: Any) -> None:
        """Without asynchronous scheduling the scheduler is told the drafts; with it the worker keeps them."""
        names = [name for name in output.num_scheduled_tokens if name in self.runner.slots]
        made = self.runner.propose(names)
        if not self.shape.ahead and names:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, made))

    def _deliver(self, outputs: dict[int, Any]) -> None:
        """Tokens reach their users; each must be the next of the right answer."""
        for output in (one for each in outputs.values() for one in each.outputs):
            name, said = output.request_id, self.said[output.request_id]
            if name in self.ended:
                raise Wrong(f"{name}: tokens after its end ({self.ended[name]})")
            said += output.new_token_ids
            answer = self.truths[name].answer
            if said != answer[: len(said)]:
                raise Wrong(f"{name}: says {said}, should say {answer}")
            if output.finish_reason is not None:
                self.ended[name] = str(output.finish_reason)
                if said != answer:
                    raise Wrong(f"{name}: ends after {len(said)} of {len(answer)} tokens")

    # -- what must hold -------------------------------------------------------------------------------

    def _known_without(self, output: Any = None) -> Known:
        """What the worker has done, less those whom that step admits anew."""
        slots = dict(self.runner.slots)
        for name in () if output is None else admitted(output):
            slots.pop(name, None)
        return Known(
            frozenset(name for name, slot in slots.items() if slot.speaks),
            {name: slot.computed for name, slot in slots.items()},
        )

    @property
    def settled(self) -> Known:
        """What the worker has done, without the step still in flight."""
        return self._flying[-1][2] if self._flying else self._known_without()

    def _same_blocks(self, output: Any) -> None:
        """The worker's table of blocks is the scheduler's."""
        for name in output.num_scheduled_tokens:
            table = self.runner.slots[name].table
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
            if blocks != table:
                raise Wrong(f"{name}: the scheduler's blocks are {blocks}, the worker's {table}")

    def _within_limits(self, output: Any) -> None:
        total = sum(output.num_scheduled_tokens.values())
        if total > self.shape.budget:
            raise Wrong(f"{total} tokens in a step of {self.shape.budget}")
        if len(self.scheduler.running) > self.shape.running:
            raise Wrong(f"{len(self.scheduler.running)} requests run, {self.shape.running} may")

    def _nothing_left(self) -> None:
        scheduler = self.scheduler
        left = [*scheduler.requests, *scheduler.running, *scheduler.waiting]
        for name in ("skipped_waiting", "kv_holding_waiting", "deferred_waiting", "_inflight_prefills"):
            left += getattr(scheduler, name, ())
        if left or self.runner.slots:
            raise Wrong(f"left behind: {left}, in the worker {sorted(self.runner.slots)}")
        if free_blocks(scheduler) != self.shape.blocks:
            raise Wrong(f"{self.shape.blocks - free_blocks(scheduler)} blocks leaked")
        if scheduler.max_num_scheduled_tokens != self.shape.budget:
            raise Wrong(f"the step's budget is {scheduler.max_num_scheduled_tokens} now")


def serve_plain(shape: EngineShape, traffic: Traffic) -> Oracle:
    """Without headgate: `tools/vllm_release.py` does not count what fails in here as headgate's."""
    return Oracle(scheduler(shape), shape, traffic).run()


def admitted(output: Any) -> list[str]:
    """Who gets a slot in that step, for the first time or again."""
    fresh = [data.req_id for data in output.scheduled_new_reqs]
    return [*fresh, *output.scheduled_cached_reqs.resumed_req_ids]
