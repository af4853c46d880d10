"""KV handed over between emulators, in one process or from port to port."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

import aiohttp

from headgate.live.emulate.api import ProblemError
from headgate.live.emulate.engine import EmulatedEngine, EmulatedJob
from headgate.live.emulate.text import spoiled

NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
REMEMBERED = 10_000  # expired requests, so that a late reader can be told from an unknown one


class Export(NamedTuple):
    job: EmulatedJob
    expires: float  # emulated seconds


class Exports:
    def __init__(self, engine: EmulatedEngine, lease: float) -> None:
        self.id = str(uuid4())
        self.engine, self.lease = engine, lease
        self.host, self.port = "127.0.0.1", 0
        self.kept: dict[str, Export] = {}
        self._expired: dict[str, None] = {}  # oldest first
        engine.on_keep = self.keep
        NAMES[self.id] = self

    def keep(self, job: EmulatedJob) -> None:
        expires = self.engine.now + self.lease
        self.kept[job.export] = Export(job, expires)
        self.engine.at(expires, self.expire)

    def params(self, job: EmulatedJob) -> dict[str, Any] | None:
        if (export := self.kept.get(job.export)) is None:
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
            **dict.fromkeys(("tp_size", "dcp_size", "pp_size"), 1),
            "remote_num_tokens": job.prompt,
            "remote_blocks_expiry_time": self.engine.clock.wall(export.expires),
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    def expire(self) -> None:
        now = self.engine.now
        for request, export in list(self.kept.items()):
            if export.expires > now:
                break
            del self.kept[request]
            self.engine.release(export.job.id)
            self.engine.tally.nixl["kv_expired_reqs"] += 1
            self._expired[request] = None
            if len(self._expired) > REMEMBERED:
                del self._expired[next(iter(self._expired))]

    def read(self, request: str, mark: int) -> int:
        self.expire()
        if (export := self.kept.pop(request, None)) is None:
            if request in self._expired:
                self.engine.tally.nixl["notifications_after_expiry"] += 1
            return spoiled(mark)
        copied = self.engine.now + self.engine.memory.copy.seconds(export.job.prompt)
        self.engine.at(copied, lambda: self.engine.release(export.job.id))
        return export.job.mark

    def free(self, request: str) -> bool:
        self.expire()
        export = self.kept.pop(request, None)
        return export is not None and self.engine.release(export.job.id)


NAMES: WeakValueDictionary[str, Exports] = WeakValueDictionary()  # all engines of this process


def wants_import(params: dict[str, Any] | None) -> bool:
    """Parameters that lack a field are ignored, as by vLLM."""
    return bool(params and params.get("do_remote_prefill") and all(name in params for name in NEEDED))


def source(params: dict[str, Any]) -> tuple[str, str]:
    """Engine and request of the first leg: text, whatever the client wrote."""
    return str(params.get("remote_engine_id"))[:100], str(params.get("remote_request_id"))[:300]


# -- from an engine of another process

PATH = "/emulate/kv"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PATIENCE = 5.0  # seconds until a host that does not answer counts as dead


class LoadFailedError(Exception):
    pass


class Peers:
    """Calls only loopback and hosts named beforehand: the host stands in the client's body."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        self._hosts = {*LOOPBACK, *hosts}
        self._session: aiohttp.ClientSession | None = None

    async def read(self, own: str, params: dict[str, Any], mark: int) -> int:
        engine, request = source(params)
        if engine == own:
            raise ProblemError("The KV of a request cannot be read from the engine itself.", 500)
        if (exports := NAMES.get(engine)) is None:
            answer = await self._call(params, {"read": request, "engine": engine, "mark": str(mark)})
            return int(answer["mark"])
        if exports.engine.dead is not None:
            raise LoadFailedError
        return exports.read(request, mark)

    async def free(self, params: dict[str, Any]) -> None:
        """The request was refused here; a failure of this changes nothing."""
        engine, request = source(params)
        if (exports := NAMES.get(engine)) is not None:
            exports.free(request)
            return
        with suppress(LoadFailedError):
            await self._call(params, {"free": request, "engine": engine})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _call(self, params: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
        host, port = str(params.get("remote_host"))[:100], params.get("remote_port")
        if host not in self._hosts or not isinstance(port, int) or not 0 < port < 65536:
            raise LoadFailedError
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE))
        shown = f"[{host}]" if ":" in host else host
        try:
            async with self._session.post(f"http://{shown}:{port}{PATH}", json=words) as answer:
                found = await answer.json()
                if answer.status != 200 or not str(found.get("mark", "0")).isdigit():
                    raise LoadFailedError
                return dict(found)
        except (TimeoutError, aiohttp.ClientError, ValueError, AttributeError, OSError):
            raise LoadFailedError from None
