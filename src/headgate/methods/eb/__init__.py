"""Exclusive batching: decode until enough seats are idle, then prefill."""
