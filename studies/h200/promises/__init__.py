"""Promises through the real HTTP server: arms take turns in one `vllm serve`."""
