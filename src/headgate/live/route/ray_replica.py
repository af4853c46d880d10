"""The old name of the mixin for deployments that report first tokens."""

from __future__ import annotations

from headgate.live.ray.router import Reports

__all__ = ["Reports"]
