"""The old name of `headgate.live.ray.router`, which stands in users' Serve files."""

from __future__ import annotations

from headgate.live.ray.router import HeadgateRouter, router_config

__all__ = ["HeadgateRouter", "router_config"]
