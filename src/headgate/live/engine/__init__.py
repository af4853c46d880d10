"""One live engine as policies see it."""
