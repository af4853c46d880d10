"""Promises kept: TTFT and time between tokens, step by step."""

import headgate.methods.names  # noqa: F401  (registers this method; imported first, the circle closes cleanly)
