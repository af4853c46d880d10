"""Memory of request bodies, bounded over all requests."""

from __future__ import annotations


class BodyBytes:
    """Bytes of the bodies that are in the router."""

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
