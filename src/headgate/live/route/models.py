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

    async def listed(self) -> dict[str, Any]:
        """OpenAI's list; a model of several engines stands in it once."""
        now = self.app.now()
        if self._list is not None and now - self._at < KEPT:
            return self._list
        up = [each for each in self.app.upstreams.values() if each.healthy and not each.retired][:ASKED]
        answers = await asyncio.gather(*(self._ask(each) for each in up))
        models = {str(model.get("id")): model for answer in reversed(answers) for model in answer}
        if not any(answers):
            raise RefusedError(503, "no-engines", "no engine is up", 5)
        self._list, self._at = {"object": "list", "data": list(models.values())}, now
        return self._list

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
