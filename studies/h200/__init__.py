"""Policies inside vLLM on one H200: speed side by side in one engine, and greedy tokens compared."""
