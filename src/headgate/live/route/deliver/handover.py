"""A prompt on one engine, its output on another: bodies of the two legs and the parameters between them.

NIXL's pull protocol: the prefill answers with opaque parameters, the decode engine pulls the KV they name.
vLLM answers 200 with wrong tokens when parameters are used twice, late, or after a rejected decode. So they
are one-shot: sent once, before their deadline, or given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from math import inf
from secrets import token_hex
from typing import Any

import msgspec

from headgate.core.policy import End
from headgate.live.route.deliver.connections import Fault, LegError
from headgate.live.route.deliver.legs import Legs, OpenLeg, RoutedRequest
from headgate.live.route.engines import Upstream
from headgate.live.route.gate.gate import Gate, Ticket
from headgate.live.route.request import Body, Steps, fields_of, with_field
from headgate.live.tasks import Tasks, end_all, keep

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
        self.background: Tasks = set()

    async def prefill(
        self, job: RoutedRequest, ticket: Ticket, upstream: Upstream, detach: Callable[[], None]
    ) -> KvParams | None:
        """Without its client, call and slot stay until the prompt is done, so that its KV can be released."""
        task = asyncio.create_task(self._prefill(job, upstream))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done() or (not task.cancelled() and task.exception() is None):
                detach()
                keep(self.background, self._abandoned(job, ticket, task))
            raise

    async def _abandoned(
        self, job: RoutedRequest, ticket: Ticket, task: asyncio.Task[KvParams | None]
    ) -> None:
        try:
            params = await task
            if params is not None:
                self.release(job, params)
        except LegError:
            pass
        finally:
            self.gate.end(ticket, End.ABORTED)

    async def decode(
        self, job: RoutedRequest, ticket: Ticket, call: OpenLeg, params: KvParams, detach: Callable[[], None]
    ) -> None:
        """When the client hangs up before it, the call is left to go on until then: only an engine that has
        read the KV tells its owner so, and parameters that were sent cannot be released by another call. The
        slot is held meanwhile. A decode that could not be sent releases its KV.
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
                keep(self.background, self._consumed(job, ticket, call, task))
            raise

    async def _decode(self, job: RoutedRequest, call: OpenLeg, body: Body, params: KvParams) -> None:
        owner = self.upstreams[params.owner]
        late = params.deadline - (SHARE_OF_LEASE - SOON) * self.legs.config.kv.lease
        owner.reading.append(late)
        try:
            await call.start(job, body)
            if self.now() > late:
                owner.read_late = self.now()
        except LegError as fault:
            if fault.fault is Fault.CONNECT:
                params.taken = False  # it never left the router
                self.release(job, params)
            raise
        finally:
            owner.reading.remove(late)

    async def _consumed(
        self, job: RoutedRequest, ticket: Ticket, call: OpenLeg, task: asyncio.Task[None]
    ) -> None:
        self.legs.metrics.consumed.inc()
        try:
            await asyncio.wait((task,), timeout=self.legs.config.kv.lease if job.asked.stream else CONSUMED)
            await end_all([task])
        finally:
            call.close()
            self.gate.end(ticket, End.ABORTED)

    async def _prefill(self, job: RoutedRequest, upstream: Upstream) -> KvParams | None:
        kv = self.legs.config.kv
        body = await self.legs.turns.finish(prefill_body(job.asked.body, kv.reuse_tokens))
        sent = self.now()
        with closing(self.legs.open(upstream, job.path)) as call:
            # KV is named after its prefill: two prompts of a request, or of two with one id, must differ
            await call.start(job, body, f"hg-{token_hex(12)}")
            status = call.leg.status
            if status >= 400 or not call.leg.whole:  # the client's fault below 500
                kind, retry = call.leg.headers.get("Content-Type", ""), status >= 500 or status == 200
                why = f"the prefill was answered {status}"
                raise LegError(Fault.STATUS, why, status, call.leg.head, kind, retry)
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

    def decode_body(self, job: RoutedRequest, params: KvParams, target: Upstream) -> Body:
        elsewhere = target.id != params.owner and self._share_kv(target, params)
        taken = params.take(self.now()) if elsewhere else None
        if taken is None:
            self.release(job, params)
            return job.asked.body
        self.legs.metrics.handovers.inc()
        return decode_body(job.asked.body, taken)

    def release(self, job: RoutedRequest, params: KvParams) -> None:
        """Give the KV up in the background: a decode that another engine refuses frees it at its owner."""
        if (raw := params.take(-inf)) is None:
            return
        others = [other for other in self.upstreams.values() if other.healthy and not other.retired]
        others = [other for other in others if other.id != params.owner and self._share_kv(other, params)]
        if not others:
            self.legs.metrics.released.labels("no-engine").inc()
            return
        others.sort(key=lambda other: other.legs)
        keep(self.background, self._release(job, others[:RELEASES], raw))

    async def _release(self, job: RoutedRequest, upstreams: list[Upstream], params: bytes) -> None:
        body, result = await self.legs.turns.finish(release_body(job.asked.body, params)), "failed"
        for upstream in upstreams:
            try:
                with closing(self.legs.open(upstream, job.path, last=True)) as call:
                    await call.leg.start(body, self.legs.headers(job, upstream), RELEASE_TIMEOUT)
                    result = "ok" if call.leg.status == 400 else f"status-{call.leg.status}"
                break
            except LegError as fault:
                if fault.fault is not Fault.CONNECT:  # it may have arrived
                    break
        self.legs.metrics.released.labels(result).inc()

    def _share_kv(self, reader: Upstream, params: KvParams) -> bool:
        owner = self.upstreams.get(params.owner)
        if owner is None or owner.sglang or reader.sglang:
            return False
        return reader.spec.kv_group == owner.spec.kv_group

    async def stop(self, seconds: float) -> None:
        if self.background:
            _, left = await asyncio.wait(self.background, timeout=seconds)
            await end_all(left)


# -- bodies, and the parameters between them

SHARE_OF_LEASE = 0.6  # after which a waiting hand-over is given up
REFUSED_LENGTH = 2147483647  # output tokens that every engine refuses, which frees the KV at its owner
REMOTE_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    choices: list[dict[str, Any]] = []


_PREFILLED = msgspec.json.Decoder(_Prefilled)


class KvParams:
    __slots__ = ("_raw", "deadline", "owner", "taken")

    def __init__(self, raw: dict[str, msgspec.Raw], owner: int, deadline: float) -> None:
        self._raw, self.owner, self.deadline, self.taken = raw, owner, deadline, False

    def take(self, now: float) -> bytes | None:
        """The parameters as JSON, for a decode or (-inf: at any time) a release; None if spent or late."""
        if self.taken or now >= self.deadline:
            return None
        self.taken = True
        return msgspec.json.encode(self._raw)


def prefill_body(body: Body, reuse_tokens: bool = False) -> Steps[bytes]:
    """The client's body for the prompt alone: one token, no stream, KV kept for another engine."""
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
    return with_field(body, b'"kv_transfer_params":' + params)


def release_body(body: Body, params: bytes) -> Steps[bytes]:
    """A decode that is refused for its length and so frees the KV at its owner; valid in all else."""
    fields: dict[str, Any] = dict((yield from fields_of(body)))
    for name in ("stream_options", "min_tokens", "max_completion_tokens"):
        fields.pop(name, None)
    fields.update(stream=False, max_tokens=REFUSED_LENGTH, kv_transfer_params=msgspec.Raw(params))
    return msgspec.json.encode(fields)


def read_params(answer: bytes, owner: int, sent: float, lease: float, reuse_tokens: bool = False) -> KvParams:
    """The lease began at some moment after the prefill was sent; how long its answer was on its way is not
    known. So the deadline counts from when it was sent, and uses 60 % of the lease.
    """
    try:
        prefilled = _PREFILLED.decode(answer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise LegError(Fault.GARBAGE, "the prefill's answer is not JSON") from None
    if prefilled.kv_transfer_params is None:
        raise LegError(Fault.NO_PARAMS, "the prefill gave no KV parameters")
    raw = dict(prefilled.kv_transfer_params)
    if reuse_tokens and (ids := _token_ids(prefilled)) is not None:
        raw["prompt_token_ids"] = ids
    return KvParams(raw, owner, sent + SHARE_OF_LEASE * lease)


def _token_ids(prefilled: _Prefilled) -> msgspec.Raw | None:
    if bytes(prefilled.prompt_token_ids).startswith(b"["):
        return prefilled.prompt_token_ids
    ids = prefilled.choices[0].get("prompt_token_ids") if prefilled.choices else None
    return msgspec.Raw(msgspec.json.encode(ids)) if isinstance(ids, list) and ids else None
