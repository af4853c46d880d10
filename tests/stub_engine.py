"""The plug-in over the stub of vLLM's scheduler, driven step by step on a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from headgate.core.policy import BatchPolicy, Observer
from headgate.core.request import Slo
from headgate.live.engine.reload import Renewed
from headgate.live.engine.settings import Settings
from stub_requests import Request
from stub_scheduler import StubScheduler, plug_in

STEP = 0.01  # seconds of a step
NOTHING = 0.5  # seconds that pass where nothing runs: some policies wait for company


class StubEngine:
    """One engine: `scheduler` is the plug-in, `now` its clock."""

    def __init__(
        self,
        policy: BatchPolicy | None,
        observers: tuple[Observer, ...] = (),
        promises: Callable[[Request], Any] = lambda request: ("", Slo(), None, ""),
        watchdog: float = 1e9,
        **words: Any,
    ) -> None:
        plugin = plug_in().plugin
        kind = type("Plugged", (plugin.Headgate, StubScheduler), {})
        self.now = 0.0
        self.scheduler = scheduler = kind(**words)
        self.renewals: deque[Any] = deque()
        settings = SimpleNamespace(watchdog=watchdog)
        known = {"policy": policy, "observers": observers, "renew": self._renew, "settings": settings}
        scheduler._headgate_begin(SimpleNamespace(**known), promises)
        self.live, self.books = scheduler._headgate, scheduler._headgate_books
        self.live.clock, self.live.origin = (lambda: self.now), 0.0
        self.live.paused()  # the watchdog's first look is due on this clock
        self.books.wall = lambda: self.now
        self.air: deque[Any] = deque()
        self.steps = 0

    def _renew(self) -> Renewed | None:
        return Renewed(Settings(), self.renewals.popleft(), {}) if self.renewals else None

    def add(self, name: str, prompt: int, limit: int, output: int | None = None, **words: Any) -> Request:
        """A request comes now."""
        words.setdefault("arrival_time", self.now)
        request = Request(name, prompt, limit, output, **words)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Compose a step; when it, or the one before it, has ended, its tokens come."""
        output = self.scheduler.schedule()
        self.steps += 1
        self.now += STEP if output.num_scheduled_tokens else NOTHING
        self.air.append(output)
        while len(self.air) > (1 if self.scheduler.asynchronous and output.num_scheduled_tokens else 0):
            self.scheduler.update_from_output(self.air.popleft(), None)
        return output

    def drain(self, most: int = 20_000) -> None:
        """Until nobody is left."""
        for _ in range(most):
            if not self.scheduler.requests and not self.air:
                return
            self.step()
        raise AssertionError(f"never ends: {len(self.scheduler.requests)} requests left")

    def sizes(self) -> dict[str, int]:
        """What every book holds; all zero when nobody is here."""
        books, ledger, live = self.books, self.live.ledger, self.live
        knobs = self.scheduler._headgate_hooks._knobs
        found = {
            f"ledger.{name}": len(getattr(ledger, name))
            for name in ("waiting", "prefilling", "decoding", "held")
        }
        found |= {f"books.{name}": len(getattr(books, name)) for name in ("entries", "requests", "holding")}
        found |= {
            f"books.{name}": len(getattr(books, name)) for name in ("_unready", "_aside", "turned_away")
        }
        found |= {"live.flights": len(live.flights), "rolling": ledger.rolling, "context": ledger.context}
        for place, queue in enumerate(knobs._queues):
            found[f"queue {place}"] = len(queue) + len(queue.members) + len(queue.taken)
        return found
