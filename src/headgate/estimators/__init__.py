"""Numbers learned online."""
