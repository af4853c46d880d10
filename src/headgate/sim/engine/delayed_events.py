"""An observer that passes on what happens while a step is composed only when the step before it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from headgate.core.ledger import Entry
from headgate.core.listeners import Listeners
from headgate.core.plan import Plan
from headgate.core.policy import End, Observer
from headgate.core.request import Request


class RequestAsOf:
    """A request as it was when something happened to it: its tokens do not move on."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.generated, self.wasted = request.generated, request.wasted
        self.last_token = request.last_token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class DelayedEvents(Observer):
    """Keeps the order in which observers would hear of steps that run one after the other.

    An engine that composes ahead admits and evicts for step n + 1 before the tokens of step n are seen. Who
    counts tokens by steps must hear of step n first.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.hear = Listeners(observers)  # for those who tell them at once
        self._news: list[tuple[list[Any], tuple[Any, ...]]] = []  # who hears it, and what
        self._stale: list[RequestAsOf] = []  # of those in `_news`

    def arrived(self, request: Request, now: float) -> None:
        """At once: it has no part in any step yet."""
        for hook in self.hear.arrived:
            hook(request, now)

    def finished(self, request: Request, now: float, how: End) -> None:
        """It left the queue: at once, unless there are news that must come first."""
        if self._news:
            self._news.append((self.hear.finished, (request, now, how)))
        else:
            for hook in self.hear.finished:
                hook(request, now, how)

    def admitted(self, request: Request, now: float) -> None:
        self._news.append((self.hear.admitted, (request, now)))

    def held(self, request: Request, now: float) -> None:
        self._news.append((self.hear.held, (request, now)))

    def resumed(self, request: Request, now: float) -> None:
        self._news.append((self.hear.resumed, (self._as_of(request), now)))

    def evicted(self, request: Request, now: float) -> None:
        self._news.append((self.hear.evicted, (self._as_of(request), now)))

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        self._news.append((self.hear.planned, (plan, now, gauges)))

    def _as_of(self, request: Request) -> RequestAsOf:
        self._stale.append(RequestAsOf(request))
        return self._stale[-1]

    def catch_up(self, dated: Sequence[tuple[Entry, int]] = (), seen: float = nan) -> None:
        """What has waited; newest tokens of those `dated`, and of how many, were `seen` only now."""
        if not self._news:
            return
        news, self._news = self._news, []
        if self._stale:
            late = {(entry.id, tokens) for entry, tokens in dated}
            for request in self._stale:
                if (request.id, request.generated) in late:
                    request.last_token = seen
            self._stale.clear()
        for hooks, words in news:
            for hook in hooks:
                hook(*words)
