"""The models of all engines, as one list."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp

from headgate.live.route.answers import RefusedError
from headgate.live.route.upstream import Upstream
from headgate.live.route.verdict import decoded

if TYPE_CHECKING:
    from headgate.live.route.app import RouterApp

KEPT = 5.0  # seconds
ASKED = 16  # engines at most
LARGEST = 1 << 20  # bytes of one engine's list


class Models:
    """Asks engines that are up, at most every few seconds."""

    def __init__(self, app: RouterApp) -> None:
        self.app = app
        self._list: dict[str, Any] | None = None
        self._at = 0.0
        self._asking: asyncio.Task[list[dict[str, Any]]] | None = None

    async def listed(self) -> dict[str, Any]:
        """OpenAI's list. Clients that ask at once are one question to the engines."""
        now = self.app.now()
        if self._list is not None and now - self._at < KEPT:
            return self._list
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        models = await asyncio.shield(self._asking)
        if not models:
            raise RefusedError(503, "no-engines", "no engine is up", 5)
        self._list, self._at = {"object": "list", "data": models}, now
        return self._list

    async def _ask_all(self) -> list[dict[str, Any]]:
        """The models of all engines; one of several engines stands in it once."""
        up = [each for each in self.app.upstreams.values() if each.healthy and not each.retired][:ASKED]
        answers = await asyncio.gather(*(self._ask(each) for each in up))
        return list(
            {str(model.get("id")): model for answer in reversed(answers) for model in answer}.values()
        )

    async def _ask(self, upstream: Upstream) -> list[dict[str, Any]]:
        headers = {"Authorization": upstream.authorization} if upstream.authorization else {}
        try:
            async with asyncio.timeout(self.app.config.health.timeout):
                url = upstream.url + "/v1/models"
                async with self.app.session.get(url, headers=headers, allow_redirects=False) as response:
                    body = bytearray()
                    async for part in response.content.iter_any():
                        body += part
                        if len(body) > LARGEST:
                            return []
        except (aiohttp.ClientError, OSError, TimeoutError):
            return []
        data = decoded(bytes(body)).get("data")
        return [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
