"""Prefill on one engine, decode on another: parameters as vLLM's NIXL connector gives and takes them.

The rules that a router must know, and the price of breaking them:

* Parameters are good for one read. A second read, a read after the lease, a read after the receiver refused
  the request: 200 and **wrong text**, as from vLLM, where the blocks hold another request by then.
* Blocks stay in the memory of the engine of the prompt until they are read or the lease ends.
* An engine refuses to read from itself (500).
"""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

from headgate.live.emulate.clock import Clock
from headgate.live.emulate.engine import EmulatedEngine
from headgate.live.emulate.job import Job
from headgate.live.emulate.text import spoiled

NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
REMEMBERED = 10_000  # expired requests, so that a late reader can be told from an unknown one
NAMES: WeakValueDictionary[str, Exports] = WeakValueDictionary()  # all engines of this process


class Export(NamedTuple):
    """A prompt whose KV is kept here."""

    job: Job
    expires: float  # emulated seconds


class Exports:
    """KV of one engine that others may read."""

    def __init__(self, engine: EmulatedEngine, lease: float) -> None:
        self.id = str(uuid4())
        self.engine, self.lease = engine, lease
        self.host, self.port = "127.0.0.1", 0
        self._kept: dict[str, Export] = {}
        self._expired: dict[str, None] = {}  # oldest first
        engine.on_keep = self.keep
        NAMES[self.id] = self

    @property
    def clock(self) -> Clock:
        return self.engine.clock

    def now(self) -> float:
        return self.engine.replica.now if self.clock.virtual else self.clock.now()

    def keep(self, job: Job) -> None:
        """The prompt is done; its KV can be read until the lease ends."""
        expires = self.now() + self.lease
        self._kept[job.export] = Export(job, expires)
        self.engine.at(expires, self.expire)

    def params(self, job: Job) -> dict[str, Any] | None:
        """The parameters with which a job that was kept can be decoded elsewhere."""
        export = self._kept.get(job.export)
        if export is None:
            return None
        blocks = self.engine.replica.blocks.of(job.prompt)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[job.id * 8 + place for place in range(min(blocks, 4096))]],
            "remote_engine_id": self.id,
            "remote_request_id": job.export,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": job.prompt,
            "remote_blocks_expiry_time": self.clock.wall(export.expires),
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    def expire(self) -> None:
        """Leases that have ended: their blocks are free for others."""
        now = self.now()
        for request, export in list(self._kept.items()):
            if export.expires > now:
                break
            del self._kept[request]
            self.engine.release(export.job.id)
            self.engine.tally.nixl["kv_expired_reqs"] += 1
            self._expired[request] = None
            if len(self._expired) > REMEMBERED:
                del self._expired[next(iter(self._expired))]

    def read(self, request: str, mark: int) -> int:
        """One read by a request that believes its prompt to have this fingerprint; what it really gets."""
        self.expire()
        export = self._kept.pop(request, None)
        if export is None:
            if request in self._expired:
                self.engine.tally.nixl["notifications_after_expiry"] += 1
            return spoiled(mark)
        copied = self.now() + self.engine.memory.seconds(export.job.prompt)
        self.engine.at(copied, lambda: self.engine.release(export.job.id))
        return export.job.mark

    def free(self, request: str) -> bool:
        """The reader refused the request: the blocks go at once."""
        self.expire()
        export = self._kept.pop(request, None)
        return export is not None and self.engine.release(export.job.id)

    @property
    def kept(self) -> int:
        return len(self._kept)


def wants_export(params: dict[str, Any] | None) -> bool:
    """Is this the first of two legs?"""
    return bool(params and params.get("do_remote_decode"))


def wants_import(params: dict[str, Any] | None) -> bool:
    """Is this the second? Parameters that lack a field are ignored, as by vLLM."""
    return bool(params and params.get("do_remote_prefill") and all(name in params for name in NEEDED))


def source(params: dict[str, Any]) -> tuple[str, str, str, int]:
    """Engine, request, host and port of the first leg; text and numbers whatever the client wrote."""
    engine, request = str(params.get("remote_engine_id"))[:100], str(params.get("remote_request_id"))[:300]
    port = params.get("remote_port")
    return engine, request, str(params.get("remote_host"))[:100], port if isinstance(port, int) else 0
