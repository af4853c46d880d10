"""Decodes with the same promise, and which of them are critical, without looking at all of them each time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import NamedTuple

from headgate.core.build import mypyc_attr
from headgate.core.request import Request

LAST: Callable[[Request], float] = attrgetter("last_token")  # of a decode: there is one


class Found(NamedTuple):
    """Critical requests, and when the earliest of them, and of the others, got its last token."""

    ids: list[int]
    first: float = inf
    others: float = inf


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DueDates:
    """Decodes whose users were promised the same time between tokens.

    Their last tokens only get newer. So a request that was not critical is checked again only when the oldest
    of those could be; in between only those that were critical, and have mostly been served since. After a
    step that served all requests none need be checked.
    """

    __slots__ = ("_awake", "_members", "_quiet", "oldest")

    def __init__(self) -> None:
        self._members: dict[int, Request] = {}
        self._awake: dict[int, Request] = {}  # to be looked at; the others' last tokens are ...
        self._quiet = inf  # ... not older than this
        self.oldest = inf  # no last token is older; it may be out of date, because they only get newer

    def __len__(self) -> int:
        return len(self._members)

    def join(self, request: Request) -> None:
        """It decodes from now on."""
        self._members[request.id] = self._awake[request.id] = request
        self.oldest = min(self.oldest, LAST(request))

    def leave(self, request: Request) -> None:
        self._members.pop(request.id, None)
        self._awake.pop(request.id, None)

    def served(self, when: float) -> None:
        """All requests got a token then."""
        self._awake, self._quiet = {}, when

    def all(self) -> list[int]:
        """All requests, where all are critical."""
        return [*self._members]

    def first(self) -> float:
        """When the one that has waited longest got its last token; looks at all requests."""
        self.oldest = min(map(LAST, self._members.values()))
        return self.oldest

    def until(self, latest: float) -> Found:
        """Those whose last token is not newer than `latest` are critical."""
        if latest >= self._quiet:
            self._awake, self._quiet = self._members.copy(), inf
        awake = self._awake
        if not awake:
            return Found([], inf, self._quiet)
        lasts = [*map(LAST, awake.values())]
        first = min(lasts)
        if first > latest:
            awake.clear()
            self._quiet = min(self._quiet, first)
            return Found([], inf, self._quiet)
        if max(lasts) > latest:
            self._quiet = min(self._quiet, min(filter(latest.__lt__, lasts)))
            self._awake = {id: awake[id] for id, at in zip(awake, lasts, strict=True) if at <= latest}
        return Found([*self._awake], first, self._quiet)
