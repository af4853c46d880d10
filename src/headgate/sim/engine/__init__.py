"""One virtual engine."""
