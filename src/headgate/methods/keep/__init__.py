"""Promises kept: TTFT and time between tokens, step by step."""
