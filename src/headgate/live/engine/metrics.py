"""Metrics of a live engine: on vLLM's own /metrics, on a port of their own, and as a line in the log."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from headgate.live.engine.background import Background
from headgate.live.engine.gauges import numbers
from headgate.live.engine.instruments import Board
from headgate.live.engine.tally import KINDS, STATES, Tally
from headgate.live.vllm.fields import LOG, Settings
from headgate.live.vllm.front import FOLDER, SHARED, leave, leaves

SHOW_EVERY = 0.25  # seconds
LEAVE_EVERY = 1.0  # seconds: as text they take a millisecond or two


class Metrics(Tally):
    """A tally that is shown: hooks only count, a thread of its own shows, four times a second.

    Where prometheus_client is missing or refuses, one line in the log says so; the lines about steps go on.
    """

    def __init__(
        self,
        settings: Settings,
        about: dict[str, str],
        kv_total: int = 0,
        engine: int = 0,
        registry: Any = None,
        background: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(about.get("policy", ""))
        self._settings, self._clock = settings, clock
        self._kv_total = kv_total
        self._server: Any = None
        self._board = self._make_board(about, engine, registry) if settings.metrics else None
        self._spoken = clock()
        self._name = f"engine-{engine}"
        self._left = -LEAVE_EVERY  # when they were last left for the front end
        self._leaves = leaves()
        self._steps_then = self.all_steps()
        self._thread = Background(self.show, SHOW_EVERY, "metrics") if background else None

    def close(self) -> None:
        """Show what is left, and stop."""
        self._left = -LEAVE_EVERY
        if self._thread is not None:
            self._thread.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def show(self) -> None:
        """Metrics now, and the line in the log when it is due."""
        if self._board is not None:
            self._board.show()
        now = self._clock()
        if self._leaves and self._board is not None and now - self._left >= LEAVE_EVERY:
            self._left = now
            leave(self._name, self._board)
        if now - self._spoken >= self._settings.log_every:
            steps = self.all_steps()
            if steps != self._steps_then:
                LOG.info("headgate: %s", self.line(now - self._spoken, steps - self._steps_then))
            self._spoken, self._steps_then = now, steps

    def line(self, seconds: float, steps: Counter[str]) -> str:
        """The last so many seconds in words."""
        counts = ", ".join(f"{steps[kind]} {kind}" for kind in KINDS)
        gauges = ", ".join(f"{name} {value:.4g}" for name, value in numbers(self.gauges).items())
        kv = f", KV {self.kv / self._kv_total:.0%}" if self._kv_total else ""
        if cached := self.tokens["cached"]:
            kv += f", {cached} prompt tokens cached so far"
        states = ", ".join(f"{count} {state}" for state, count in zip(STATES, self.states, strict=True))
        return (
            f"{self.policy}, mode {self.mode}{f' ({gauges})' if gauges else ''}; steps in {seconds:.0f} s: "
            f"{counts}; {states}{kv}; longest stall {self.longest_stall:.3f} s, {self.evictions} evictions"
        )

    def _make_board(self, about: dict[str, str], engine: int, registry: Any) -> Board | None:
        port = self._settings.metrics_port
        try:
            board = Board(self, str(engine), about, self._kv_total, registry)
        except ImportError:
            LOG.warning("headgate: no metrics, prometheus_client is not installed; pip install it")
            return None
        except Exception as error:
            LOG.warning("headgate: no metrics: %s: %s", type(error).__name__, error)
            return None
        if port is not None:
            self._server = _serve(port + engine, registry)
        elif SHARED not in os.environ and FOLDER not in os.environ:
            LOG.info(
                "headgate: metrics reach the server's /metrics when headgate is one of vLLM's plug-ins "
                "(VLLM_PLUGINS), or %s names an empty folder; or set metrics_port",
                SHARED,
            )
        return board


def _serve(port: int, registry: Any) -> Any:
    """A port of our own; one that is taken is no reason to stop."""
    from prometheus_client import REGISTRY, start_http_server

    try:
        server, _ = start_http_server(port, registry=registry or REGISTRY)
    except OSError as error:
        LOG.warning("headgate: no metrics on port %d: %s; choose another", port, error.strerror or error)
        return None
    LOG.info("headgate: metrics on port %d", port)
    return server
