"""Memory of bodies that the router holds, bounded over all requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BodyBytes:
    """Bytes of the bodies of requests, and of whole answers that clients have not read yet."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def take(self, many: int) -> bool:
        """Whether they fit; they are counted if so."""
        if self.held + many > self.most:
            return False
        self.held += many
        return True

    def give_back(self, many: int) -> None:
        self.held -= many

    @contextmanager
    def answer(self, body: object) -> Iterator[None]:
        """An answer is never refused for its size, but while it is there fewer requests fit."""
        many = len(body) if isinstance(body, bytes) else 0
        self.held += many
        try:
            yield
        finally:
            self.held -= many
