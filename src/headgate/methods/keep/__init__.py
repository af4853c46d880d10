"""Promises kept: TTFT and time between tokens, step by step."""

import headgate.policies  # noqa: F401  (registers this method; imported first, the circle closes cleanly)
