"""Durations as settings and traces write them; policies read them, too, so they are in `core`."""

from headgate.core.durations import duration, price, slice_text

__all__ = ["duration", "price", "slice_text"]
