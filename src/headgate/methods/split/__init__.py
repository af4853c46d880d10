"""Prefill and decode on different engines, in a fixed split."""
