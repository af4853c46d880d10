"""Exclusive batching: decode until enough slots are idle, then prefill."""
