"""A prompt on one engine, its output on another: bodies of the two legs and the parameters between them.

NIXL's pull protocol: the prefill answers with opaque parameters, the decode engine pulls the KV they name.
vLLM answers 200 with wrong tokens when parameters are used twice, late, or after a rejected decode. So they
are one-shot: sent once, before their deadline, or given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Any

import msgspec

from headgate.core.policy import End
from headgate.live.route.deliver.connections import Fault, LegError
from headgate.live.route.deliver.legs import Job, Legs, OpenLeg
from headgate.live.route.engines import Upstream
from headgate.live.route.gate.gate import Gate, Ticket
from headgate.live.route.request import TURN, Body, Steps, at_once, fields_of

SHARE_OF_LEASE = 0.6  # after which a waiting hand-over is given up
REFUSED_LENGTH = 2147483647  # output tokens that every engine refuses, which frees the KV at its owner
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    choices: list[dict[str, Any]] = []


_PREFILLED = msgspec.json.Decoder(_Prefilled)


class KvParams:
    """The parameters of one prefill. `take` gives them out once, and never after the deadline."""

    __slots__ = ("_raw", "deadline", "owner", "taken")

    def __init__(self, raw: dict[str, msgspec.Raw], owner: int, deadline: float) -> None:
        self._raw, self.owner, self.deadline, self.taken = raw, owner, deadline, False

    def take(self, now: float) -> bytes | None:
        """The parameters as JSON for a decode; None when they are spent or late."""
        if self.taken or now >= self.deadline:
            return None
        self.taken = True
        return msgspec.json.encode(self._raw)

    def not_sent(self) -> None:
        """The decode that took them never left the router: no connection was made."""
        self.taken = False

    def give_up(self) -> bytes | None:
        """The parameters as JSON for a release, at any time; None when they are spent."""
        if self.taken:
            return None
        self.taken = True
        return msgspec.json.encode(self._raw)


def prefill_body(body: Body, reuse_tokens: bool = False) -> bytes:
    """The client's body for the prompt alone: one token, no stream, KV kept for another engine."""
    return at_once(making_prefill(body, reuse_tokens))


def making_prefill(body: Body, reuse_tokens: bool = False) -> Steps[bytes]:
    """The same in turns."""
    fields: dict[str, Any] = dict((yield from fields_of(body)))
    for name in ("stream_options", "min_tokens"):
        fields.pop(name, None)
    fields.update(stream=False, max_tokens=1, kv_transfer_params=REMOTE_DECODE)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    if reuse_tokens:
        fields["return_token_ids"] = True
    return msgspec.json.encode(fields)


def decode_body(body: Body, params: bytes) -> bytes:
    """The client's body, byte for byte, with the parameters as one more field."""
    end, view = body.rindex(b"}"), memoryview(body)
    comma = b"" if bytes(view[max(0, end - TURN) : end]).rstrip().endswith(b"{") else b","
    return b"".join((view[:end], comma, b'"kv_transfer_params":', params, view[end:]))


def release_body(body: Body, params: bytes) -> bytes:
    """A decode that is refused for its length and so frees the KV at its owner; valid in all else."""
    return at_once(making_release(body, params))


def making_release(body: Body, params: bytes) -> Steps[bytes]:
    """The same in turns."""
    fields: dict[str, Any] = dict((yield from fields_of(body)))
    for name in ("stream_options", "min_tokens", "max_completion_tokens"):
        fields.pop(name, None)
    fields.update(stream=False, max_tokens=REFUSED_LENGTH, kv_transfer_params=msgspec.Raw(params))
    return msgspec.json.encode(fields)


def read_params(answer: bytes, owner: int, sent: float, lease: float, reuse_tokens: bool = False) -> KvParams:
    """The parameters of a prefill's answer.

    The lease began at some moment after the prefill was sent, and nobody knows how long its answer was on its
    way. So the deadline counts from when it was sent, and uses 60 % of the lease.
    """
    try:
        found = _PREFILLED.decode(answer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise LegError(Fault.GARBAGE, "the prefill's answer is not JSON") from None
    if found.kv_transfer_params is None:
        raise LegError(Fault.NO_PARAMS, "the prefill gave no KV parameters")
    raw = dict(found.kv_transfer_params)
    ids = _token_ids(found)
    if reuse_tokens and ids is not None:
        raw["prompt_token_ids"] = ids
    return KvParams(raw, owner, sent + SHARE_OF_LEASE * lease)


def _token_ids(found: _Prefilled) -> msgspec.Raw | None:
    if bytes(found.prompt_token_ids).startswith(b"["):
        return found.prompt_token_ids
    ids = found.choices[0].get("prompt_token_ids") if found.choices else None
    return msgspec.Raw(msgspec.json.encode(ids)) if isinstance(ids, list) and ids else None


# -- The calls of a split request: prefill, decode, and giving KV up ------------------------------------

log = logging.getLogger("headgate.route")
RELEASE_TIMEOUT = 5.0  # seconds
RELEASES = 3  # engines that are asked to release KV, where the first cannot be reached
SOON = 0.1  # of a lease, from the prefill on: KV is there, even where leases are shorter than we are told
CONSUMED = 5.0  # seconds in which a decode that does not stream has surely read its KV


class Splitter:
    """Makes those calls. KV parameters leave it once: in a decode, or in a release."""

    def __init__(
        self, gate: Gate, upstreams: Mapping[int, Upstream], legs: Legs, now: Callable[[], float]
    ) -> None:
        self.gate, self.upstreams, self.legs, self.now = gate, upstreams, legs, now
        self.background: set[asyncio.Task[None]] = set()

    async def prefill(
        self, job: Job, ticket: Ticket, upstream: Upstream, detach: Callable[[], None]
    ) -> KvParams | None:
        """The prompt's KV parameters, None where the engine gave none.

        When the client hangs up the call is left to end, so that the KV it pins can be released; the seat is
        held until then.
        """
        task = asyncio.create_task(self._prefill(job, upstream))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done() or (not task.cancelled() and task.exception() is None):
                detach()
                self._keep(self._abandoned(job, ticket, task))
            raise

    async def _abandoned(self, job: Job, ticket: Ticket, task: asyncio.Task[KvParams | None]) -> None:
        try:
            params = await task
            if params is not None:
                self.release(job, params)
        except LegError:
            pass
        finally:
            self.gate.end(ticket, End.ABORTED)

    async def decode(
        self, job: Job, ticket: Ticket, call: OpenLeg, params: KvParams, detach: Callable[[], None]
    ) -> None:
        """Send the decode and wait for its first token.

        When the client hangs up before it, the call is left to go on until then: only an engine that has read
        the KV tells its owner so, and parameters that were sent cannot be released by another call. The seat
        is held meanwhile. A decode that could not be sent releases its KV.
        """
        body = self.decode_body(job, params, call.upstream)
        if body is job.asked.body:  # no parameters: an abort leaves nothing behind
            return await call.start(job, body)
        task = asyncio.create_task(self._decode(job, call, body, params))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                detach()
                self._keep(self._consumed(job, ticket, call, task))
            raise

    async def _decode(self, job: Job, call: OpenLeg, body: Body, params: KvParams) -> None:
        owner = self.upstreams[params.owner]
        late = params.deadline - (SHARE_OF_LEASE - SOON) * self.legs.config.kv.lease
        owner.reading.append(late)
        try:
            await call.start(job, body)
            if self.now() > late:
                owner.read_late = self.now()
        except LegError as fault:
            if fault.fault is Fault.CONNECT:
                params.not_sent()
                self.release(job, params)
            raise
        finally:
            owner.reading.remove(late)

    async def _consumed(self, job: Job, ticket: Ticket, call: OpenLeg, task: asyncio.Task[None]) -> None:
        """Wait for the first token of a decode without a client; an answer that does not stream has none."""
        self.legs.metrics.consumed.inc()
        try:
            await asyncio.wait((task,), timeout=self.legs.config.kv.lease if job.asked.stream else CONSUMED)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            call.close()
            self.gate.end(ticket, End.ABORTED)

    async def _prefill(self, job: Job, upstream: Upstream) -> KvParams | None:
        kv = self.legs.config.kv
        body = await self.legs.turns.finish(making_prefill(job.asked.body, kv.reuse_tokens))
        sent = self.now()
        with self.legs.open(upstream, job.path) as call:
            # KV is named after its prefill: two prompts of a request, or of two with one id, must differ
            await call.start(job, body, f"hg-{token_hex(12)}")
            if call.leg.status >= 400 or not call.leg.whole:
                raise self._refused(call.leg.status, call.leg.head, call.leg.headers.get("Content-Type", ""))
            call.good()
            try:
                return read_params(call.leg.head, upstream.id, sent, kv.lease, kv.reuse_tokens)
            except LegError as fault:
                if fault.fault is not Fault.NO_PARAMS:
                    call.fail(fault)
                    raise
        self.legs.metrics.no_params.labels(str(upstream.id)).inc()
        if not upstream.warned_no_params:
            upstream.warned_no_params = True
            log.warning("engine %d answers prefills without KV parameters: no KV connector?", upstream.id)
        return None

    def _refused(self, status: int, body: bytes, kind: str) -> LegError:
        """A prefill that was answered, but not with a prompt: the client's fault below 500."""
        fault = LegError(Fault.STATUS, f"the prefill was answered {status}", status, body, kind)
        fault.retry = status >= 500 or status == 200
        return fault

    def decode_body(self, job: Job, params: KvParams, target: Upstream) -> Body:
        """The body of the decode. At the engine of the prompt, or too late, it goes without parameters."""
        if target.id == params.owner or not self._same_group(target.id, params.owner):
            self.release(job, params)
            return job.asked.body
        taken = params.take(self.now())
        if taken is None:
            self.release(job, params)
            return job.asked.body
        self.legs.metrics.handovers.inc()
        return decode_body(job.asked.body, taken)

    def release(self, job: Job, params: KvParams) -> None:
        """Give the KV up in the background: a decode that another engine refuses frees it at its owner."""
        raw = params.give_up()
        if raw is None:
            return
        others = [
            each
            for each in self.upstreams.values()
            if each.id != params.owner
            and each.healthy
            and not each.retired
            and self._same_group(each.id, params.owner)
        ]
        if not others:
            self.legs.metrics.released.labels("no-engine").inc()
            return
        others.sort(key=lambda each: each.legs)
        self._keep(self._release(job, others[:RELEASES], raw))

    async def _release(self, job: Job, upstreams: list[Upstream], params: bytes) -> None:
        body, result = await self.legs.turns.finish(making_release(job.asked.body, params)), "failed"
        for upstream in upstreams:
            try:
                with self.legs.open(upstream, job.path, last=True) as call:
                    await call.leg.start(body, self.legs.headers(job, upstream), RELEASE_TIMEOUT)
                    result = "ok" if call.leg.status == 400 else f"status-{call.leg.status}"
                break
            except LegError as fault:
                if fault.fault is not Fault.CONNECT:  # it may have arrived
                    break
        self.legs.metrics.released.labels(result).inc()

    def _same_group(self, first: int, second: int) -> bool:
        owner = self.upstreams.get(second)
        return owner is not None and self.upstreams[first].spec.kv_group == owner.spec.kv_group

    async def stop(self, seconds: float) -> None:
        """End what goes on in the background; releases have a moment."""
        if self.background:
            _, left = await asyncio.wait(self.background, timeout=seconds)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _keep(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self.background.add(task)
        task.add_done_callback(self.background.discard)
