"""A worker that believes only what the scheduler sends: the state rules of vLLM's two model runners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from language import Truth, heard, said
from memory import Memory, Wrong
from schedulers import EngineShape
from vllm.v1.outputs import ModelRunnerOutput

UNKNOWN = -1  # a token the worker was never told


class Ran(NamedTuple):
    """One step as the worker saw it."""

    decodes: tuple[str, ...]
    prompts: tuple[tuple[str, int], ...]  # and how many of its tokens

    @property
    def mixed(self) -> bool:
        return bool(self.decodes and self.prompts)


class Slot:
    """What a worker remembers of one request."""

    def __init__(self, tokens: list[int], prompt: int, computed: int, table: list[int], adapter: int) -> None:
        self.tokens = tokens
        self.prompt = prompt
        self.computed = computed
        self.table = table
        self.adapter = adapter
        self.speaks = False  # it has brought a token since it was last admitted: it decodes
        self.drafts: list[int] = []


class Runner:
    """What both runners share: running a batch against the checked memory, and sampling."""

    def __init__(self, shape: EngineShape, memory: Memory, truths: Mapping[str, Truth]) -> None:
        self.shape = shape
        self.memory = memory
        self.truths = truths
        self.slots: dict[str, Slot] = {}
        self.steps: list[Ran] = []
        self.guesses = 0  # which drafts come next: some right, some wrong
        self.lost: list[str] = []  # whose drafts were asked for and were not there

    def execute(self, output: Any) -> ModelRunnerOutput:
        """Run one step and say its tokens."""
        self.follow(output)
        for copy in getattr(output, "kv_cache_block_copies", None) or ():
            self.memory.copy(copy.src_block_id, copy.dst_block_id)
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        if self.shape.adapters:
            adapters = {self.slots[name].adapter for name in scheduled} - {0}
            if len(adapters) > self.shape.adapters:
                raise Wrong(f"{len(adapters)} adapters in one step, room for {self.shape.adapters}")
        self._remember(scheduled)
        sampled = [self._run(name, count, drafts.get(name, [])) for name, count in scheduled.items()]
        names = list(scheduled)
        self.after(dict(zip(names, sampled, strict=True)))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[list(tokens) for tokens in sampled],
        )

    def follow(self, output: Any) -> None:
        """Bring what is remembered up to date with the scheduler's message."""
        raise NotImplementedError

    def feed(self, name: str, first: int, count: int) -> list[int]:
        """The tokens this runner would give to the model at these positions."""
        raise NotImplementedError

    def after(self, sampled: dict[str, list[int]]) -> None:
        """What the runner keeps of the tokens it sampled."""
        raise NotImplementedError

    def _remember(self, scheduled: Mapping[str, int]) -> None:
        decodes = tuple(name for name in scheduled if self.slots[name].speaks)
        prompts = tuple((name, n) for name, n in scheduled.items() if not self.slots[name].speaks)
        self.steps.append(Ran(decodes, prompts))

    def _run(self, name: str, count: int, drafts: list[int]) -> list[int]:
        slot, truth = self.slots[name], self.truths[name]
        near = slot.computed + 2 * (1 + self.shape.drafts) >= self.shape.longest  # vLLM skips steps there
        if UNKNOWN in drafts and slot.speaks and not slot.drafts and not near:
            self.lost.append(name)
        drafts = [self._draft(slot, place, draft) for place, draft in enumerate(drafts)]
        real, first = count - len(drafts), slot.computed
        if real < 1 or count < 1:
            raise Wrong(f"{name}: {count} tokens scheduled, {len(drafts)} of them drafts")
        tokens = self.feed(name, first, real)
        if len(tokens) != real:
            raise Wrong(f"{name}: {real} tokens scheduled from {first} on, the worker knows {len(tokens)}")
        for position, token in enumerate(tokens, first):
            if token != truth.token(position):
                raise Wrong(
                    f"{name}: token {token} at position {position}, should be {truth.token(position)}"
                )
        state = self.memory.forward(name, truth, slot.table, first, tokens)
        slot.computed = first + real
        if slot.computed < len(slot.tokens):
            if drafts:
                raise Wrong(f"{name}: drafts behind an unfinished prompt")
            return []
        slot.speaks = True
        return self._verify(name, slot, state, drafts)

    def _verify(self, name: str, slot: Slot, state: int, drafts: list[int]) -> list[int]:
        """Drafts are kept up to the first wrong one; the model's own next token comes behind."""
        truth, first = self.truths[name], slot.computed
        if drafts:
            self.memory.forward(name, truth, slot.table, first, drafts)
        found = [said(state)]
        for draft in drafts:
            if draft != found[-1]:
                break
            state = heard(state, draft)
            found.append(said(state))
        slot.computed += len(found) - 1
        return found

    def _draft(self, slot: Slot, place: int, draft: int) -> int:
        """The scheduler sends -1 where only the worker knows the draft."""
        if draft != UNKNOWN:
            return draft
        return slot.drafts[place] if place < len(slot.drafts) else 0

    def propose(self, names: list[str]) -> list[list[int]]:
        """Drafts for the next step: every third is wrong."""
        made = []
        for name in names:
            slot, truth = self.slots[name], self.truths[name]
            drafts = []
            for place in range(self.shape.drafts):
                self.guesses += 1
                right = truth.token(slot.computed + 1 + place)
                drafts.append((right + 1) % 997 if self.guesses % 3 == 0 else right)
            slot.drafts = drafts if slot.speaks else []
            made.append(list(slot.drafts))
        return made


class SecondRunner(Runner):
    """V2: a request keeps its slot from admission to its end or preemption; its tokens stay on the device."""

    def follow(self, output: Any) -> None:
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self.slots.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.slots[new.req_id] = _slot(new, new.prefill_token_ids)
        if len(self.slots) > self.shape.running:
            raise Wrong(f"{len(self.slots)} requests in {self.shape.running} slots")
        cached = output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            slot = self.slots[name]
            if not self.shape.drafts and slot.computed != cached.num_computed_tokens[place]:
                raise Wrong(f"{name}: {slot.computed} computed, told {cached.num_computed_tokens[place]}")
            if cached.new_block_ids[place] is not None:
                slot.table.extend(cached.new_block_ids[place][0])

    def feed(self, name: str, first: int, count: int) -> list[int]:
        return self.slots[name].tokens[first : first + count]

    def after(self, sampled: dict[str, list[int]]) -> None:
        for name, tokens in sampled.items():
            self.slots[name].tokens += tokens


class FirstRunner(Runner):
    """V1: whoever is not in a step leaves the batch and joins it again from what is remembered or sent.

    Under asynchronous scheduling it does not know the tokens it sampled, except those of the step before.
    """

    def __init__(self, shape: EngineShape, memory: Memory, truths: Mapping[str, Truth]) -> None:
        super().__init__(shape, memory, truths)
        self.batch: set[str] = set()
        self.newest: dict[str, int] = {}  # tokens of the step before, still on the device

    def follow(self, output: Any) -> None:
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        for name in output.finished_req_ids:
            self.slots.pop(name, None)
            self._leave(name)
        for name in self.batch - (scheduled.keys() - cached.resumed_req_ids):
            self._leave(name)
        for new in output.scheduled_new_reqs:
            self.slots[new.req_id] = _slot(new, new.prompt_token_ids)
        for place, name in enumerate(cached.req_ids):
            self._renew(name, cached, place)
        self.batch |= scheduled.keys()
        if len(self.batch) > self.shape.running:
            raise Wrong(f"{len(self.batch)} requests in a batch of {self.shape.running}")

    def _renew(self, name: str, cached: Any, place: int) -> None:
        slot, outputs = self.slots[name], cached.num_output_tokens[place]
        if not (self.shape.ahead and self.shape.drafts and name in self.batch):
            slot.computed = cached.num_computed_tokens[place]
            del slot.tokens[slot.prompt + outputs :]
        # Else only the device knows how many drafts of the step before were right.
        blocks = cached.new_block_ids[place]
        if name in cached.resumed_req_ids:
            slot.table = list(blocks[0])
            slot.speaks = False
        elif blocks is not None:
            slot.table.extend(blocks[0])
        if name not in self.batch and self.shape.ahead and outputs:
            sent = cached.all_token_ids[name]
            slot.tokens[slot.prompt :] = sent[-outputs:]

    def _leave(self, name: str) -> None:
        self.batch.discard(name)
        self.newest.pop(name, None)
        if self.shape.ahead and name in self.slots:
            self.slots[name].drafts = []  # they were on the device, by the place in the batch

    def feed(self, name: str, first: int, count: int) -> list[int]:
        tokens = self.slots[name].tokens[first : first + count]
        if name in self.newest:
            tokens[-1:] = [self.newest[name]]
        return tokens

    def after(self, sampled: dict[str, list[int]]) -> None:
        if self.shape.ahead:
            self.newest = {name: tokens[-1] for name, tokens in sampled.items() if tokens}
        for name, tokens in sampled.items():
            self.slots[name].tokens += [UNKNOWN] * len(tokens) if self.shape.ahead else tokens


RUNNERS = {1: FirstRunner, 2: SecondRunner}


def _slot(new: Any, tokens: list[int]) -> Slot:
    adapter = new.lora_request.lora_int_id if new.lora_request else 0
    return Slot(
        list(tokens), len(new.prompt_token_ids), new.num_computed_tokens, list(new.block_ids[0]), adapter
    )
