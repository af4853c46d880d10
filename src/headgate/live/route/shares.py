"""What clients share: connections, requests and memory, bounded over all of them and for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 8  # times what is left: as much may one client hold


class Shares:
    """A bounded number of things, of which no client can take all.

    A client may take more if it then holds no more than SHARE times what is left. So one alone gets eight
    ninths of them, which a service behind a single proxy hardly notices, and others always find some: the
    more clients there are that take what they can, the less each of them gets. `each` is a fixed bound.
    """

    def __init__(self, most: int, each: int | None = None) -> None:
        self.most, self.each, self.held = most, each, 0
        self._of: dict[str, int] = {}  # by client, of those that hold something

    def take(self, client: str, many: int = 1) -> bool:
        """Whether it may have them; they are counted if so."""
        if not self.fits(client, many):
            return False
        self.held += many
        self._of[client] = self._of.get(client, 0) + many
        return True

    def fits(self, client: str, many: int = 1) -> bool:
        """Whether it might take so many now."""
        free, mine = self.most - self.held, self._of.get(client, 0) + many
        shared = mine == many or mine <= SHARE * (free - many)  # one that holds nothing may have the last
        return many <= free and shared and (self.each is None or mine <= self.each)

    def give_back(self, client: str, many: int = 1) -> None:
        self.held -= many
        left = self._of.get(client, 0) - many
        if left:
            self._of[client] = left
        else:
            self._of.pop(client, None)


class BodyBytes(Shares):
    """Bytes of the bodies of requests, and of whole answers that clients have not read yet."""

    @contextmanager
    def answer(self, client: str, body: object) -> Iterator[bool]:
        """An answer is never refused, but while it is there fewer requests fit; is it within the share?"""
        many = len(body) if isinstance(body, bytes) else 0
        fits = self.fits(client, many)
        self.held += many
        self._of[client] = self._of.get(client, 0) + many
        try:
            yield fits
        finally:
            self.give_back(client, many)
