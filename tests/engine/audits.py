"""headgate's books against vLLM's own, after every step."""

from __future__ import annotations

from typing import Any

from memory import Wrong
from oracle import Oracle

QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")


def audit(oracle: Oracle) -> None:
    """Raise where a policy sees something else than there is."""
    scheduler: Any = oracle.scheduler
    ledger, entries = scheduler._headgate.ledger, scheduler._headgate_books.entries
    if scheduler._headgate_hooks.broken:
        raise Wrong(f"headgate itself broke: {scheduler._headgate.fallen}")
    names = {entry.id: name for name, entry in entries.items()}
    _who_is_where(oracle, scheduler, ledger, names)
    for id, name in names.items():
        if ledger.find(id) is not None:
            _one(oracle, name, entries[name], scheduler.requests[name])
    rolling = [entry for entry in ledger.decoding.values() if entry.rolls]
    _same("decodes that share the tick", ledger.rolling, len(rolling))
    _same("their context", ledger.context, sum(entry.held_kv for entry in rolling))
    _same("decodes held", set(ledger.held), {e.id for e in ledger.decoding.values() if not e.rolls})
    if oracle.shape.adapters:
        adapters = {r.lora_request.lora_int_id for r in scheduler.running if r.lora_request}
        if len(adapters) > oracle.shape.adapters:
            raise Wrong(f"{len(adapters)} adapters among the running, room for {oracle.shape.adapters}")


def _who_is_where(oracle: Oracle, scheduler: Any, ledger: Any, names: dict[int, str]) -> None:
    waiting = {r.request_id: r for queue in QUEUES for r in getattr(scheduler, queue, ())}
    shown = {names[id] for id in ledger.waiting}
    # Policies do not see who cannot run for now: its status says so, or there is no room for its adapter.
    hidden = {
        name
        for name, request in waiting.items()
        if scheduler._is_blocked_waiting_status(request.status)
        or (name not in shown and request.lora_request)
    }
    running = {request.request_id for request in scheduler.running}
    decoding = {names[id] for id in ledger.decoding}
    _same("waiting", shown, waiting.keys() - hidden)
    _same("running", decoding | {names[id] for id in ledger.prefilling}, running)
    _same("decoding", decoding, running & oracle.settled.speakers)


def _one(oracle: Oracle, name: str, entry: Any, request: Any) -> None:
    ledger = oracle.scheduler._headgate.ledger
    _same(f"{name}: prompt", entry.prompt, request.num_prompt_tokens)
    _same(f"{name}: limit", entry.limit, request.max_tokens)
    _same(f"{name}: priority", entry.priority, request.priority)
    _same(f"{name}: evictions", entry.evictions, request.num_preemptions)
    in_0_26 = hasattr(request, "async_tokens_to_discard") and request.num_preemptions > 0
    if entry.id in ledger.waiting and getattr(request, "drop_stale_output", in_0_26):
        return  # its newest token was thrown away with its KV; counted again when it is admitted
    _same(f"{name}: tokens", entry.generated, request.num_output_tokens)
    if entry.id in ledger.waiting:
        _same(f"{name}: to prefill", entry.todo + entry.hit, request.num_tokens - request.num_computed_tokens)
    elif entry.id in ledger.prefilling and name in oracle.settled.computed:
        _same(f"{name}: to prefill", entry.todo, request.num_tokens - oracle.settled.computed[name])


def _same(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise Wrong(f"{what}: headgate says {ours}, vLLM {theirs}")
