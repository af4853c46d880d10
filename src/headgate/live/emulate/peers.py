"""Reading KV from an engine of another process: a call to the port that its parameters name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import aiohttp

from headgate.live.emulate.kv import NAMES, source
from headgate.live.emulate.problems import ProblemError

PATH = "/emulate/kv"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PATIENCE = 5.0  # seconds until a host that does not answer counts as dead


class LoadFailedError(Exception):
    """The KV could not be read: the engine of the prompt is gone."""


class Peers:
    """Where KV may be read from: engines of this process, loopback, and hosts named beforehand.

    The host stands in the client's body, so no other address is ever called.
    """

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        self._hosts = {*LOOPBACK, *hosts}
        self._session: aiohttp.ClientSession | None = None

    async def read(self, own: str, params: dict[str, Any], mark: int) -> int:
        """The fingerprint of the KV that these parameters lead to; they are spent now."""
        engine, request, _, _ = source(params)
        if engine == own:
            raise ProblemError("The KV of a request cannot be read from the engine itself.", 500)
        here = NAMES.get(engine)
        if here is not None:
            if here.engine.dead is not None:
                raise LoadFailedError
            return here.read(request, mark)
        told = await self._call(params, {"read": request, "engine": engine, "mark": str(mark)})
        return int(told["mark"])

    async def free(self, params: dict[str, Any]) -> None:
        """The request was refused here; a failure of this is nobody's concern."""
        engine, request, _, _ = source(params)
        here = NAMES.get(engine)
        if here is not None:
            here.free(request)
            return
        try:
            await self._call(params, {"free": request, "engine": engine})
        except LoadFailedError:
            return

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _call(self, params: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
        _, _, host, port = source(params)
        if host not in self._hosts or not 0 < port < 65536:
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
