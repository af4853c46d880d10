"""Real time."""
