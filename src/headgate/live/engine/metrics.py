"""Metrics of a live engine: on the server's /metrics, on a port of their own, and as a line in the log."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from headgate.core.version import VERSION
from headgate.live.engine.process import FOLDER, LOG, SHARED, Background, leave_metrics, leaves_metrics
from headgate.live.engine.requests import IGNORED
from headgate.live.engine.settings import Settings
from headgate.live.engine.tally import BY_CLASS, IDLE, KINDS, NO_CLASS, QUEUE, STATES, Tally, numbers

SHOW_EVERY = 0.25  # seconds
LEAVE_EVERY = 1.0  # seconds: as text they take a millisecond or two
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Each metric: its help, and its labels beside `engine`.
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "headgate_info": ("What is on; always 1.", ("version", "policy", "card", "model")),
    "headgate_mode": (
        "1 for what decides now: the policy, one of the two ways of eb+, or fallback.",
        ("mode",),
    ),
    "headgate_fallen": ("1 when the engine decides alone because the policy failed.", ()),
    "headgate_phase": ("1 for the kind of the newest step, or idle.", ("phase",)),
    "headgate_policy": ("The policy's own numbers: threshold, slots, estimates.", ("gauge",)),
    "headgate_threshold": ("Idle slots that start a refill (k of EB).", ()),
    "headgate_slots": ("Requests the policy lets run at once.", ()),
    "headgate_requests": ("Requests here, by state.", ("state",)),
    "headgate_queue": ("Requests that wait, by class.", ("class",)),
    "headgate_kv_use_ratio": ("KV held, as a share of all.", ()),
    "headgate_tokens_per_step": ("Tokens a decode gets in a step of late, with speculation.", ("class",)),
    "headgate_longest_stall_seconds": ("The longest gap of a decode that was held.", ()),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "headgate_steps": ("Steps, by what ran in them.", ("kind",)),
    "headgate_tokens": ("Tokens scheduled; cached: prompt tokens found in the prefix cache.", ("kind",)),
    "headgate_drafts": ("Drafts that were verified, with speculation.", ("class", "accepted")),
    "headgate_plans": ("Times the policy was asked.", ()),
    "headgate_finished": ("Requests that left, by how.", ("how",)),
    "headgate_evictions": ("Requests whose KV was dropped, by class.", ("class",)),
    "headgate_promises": (
        "Promises that were kept or broken: of requests with a first token, of requests that ended.",
        ("class", "promise", "kept"),
    ),
    "headgate_tenant_tokens": ("Tokens served, by tenant.", ("tenant", "kind")),
    "headgate_wasted_tokens": ("Tokens computed in vain, by cause.", ("cause",)),
    "headgate_rescues": ("Plans whose prompts the engine all refused.", ()),
    "headgate_bent_plans": ("Steps that the engine could not run as planned; it ran the nearest.", ()),
    "headgate_fallbacks": ("Times the policy was relieved, and why; the log says more.", ("reason",)),
    "headgate_renewals": ("Times the settings were read again and another policy took over.", ()),
    "headgate_ignored_words": ("Wrong headgate_* words of requests.", ("word",)),
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "headgate_step_seconds": ("How long a step took.", ("kind",)),
    "headgate_phase_seconds": ("How long a run of steps of one kind took.", ("kind",)),
    "headgate_stall_seconds": ("Gaps between tokens of decodes that were held.", ()),
}
LONGEST_REASON = 200  # letters
# One set per registry: a second engine in the process shares it.
_instruments: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class Metrics(Tally):
    """A thread of its own shows them, four times a second. Without prometheus_client the log still does."""

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
        self._settings, self._clock, self._kv_total = settings, clock, kv_total
        self._server: Any = None
        self._board = self._make_board(about, engine, registry) if settings.metrics else None
        self._spoken = clock()
        self._name = f"engine-{engine}"
        self._left = -LEAVE_EVERY  # when they were last left for the front end
        self._leaves = leaves_metrics()
        self._steps_then = self.all_steps()
        self._thread = Background(self.show, SHOW_EVERY, "metrics") if background else None

    @property
    def unseen(self) -> bool:
        shown = self._settings.metrics_port is not None or SHARED in os.environ or FOLDER in os.environ
        return self._board is not None and not shown

    def close(self) -> None:
        self._left = -LEAVE_EVERY
        if self._thread is not None:
            self._thread.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def show(self) -> None:
        if self._board is not None:
            self._board.show()
        now = self._clock()
        if self._leaves and self._board is not None and now - self._left >= LEAVE_EVERY:
            self._left = now
            leave_metrics(self._name, self._board)
        if now - self._spoken >= self._settings.log_every:
            steps = self.all_steps()
            if steps != self._steps_then:
                LOG.info("headgate: %s", self.line(now - self._spoken, steps - self._steps_then))
            self._spoken, self._steps_then = now, steps

    def line(self, seconds: float, steps: Counter[str]) -> str:
        counts = ", ".join(f"{steps[kind]} {kind}" for kind in KINDS)
        gauges = ", ".join(f"{name} {value:.4g}" for name, value in numbers(self.gauges).items())
        kv = f", KV {self.kv / self._kv_total:.0%}" if self._kv_total else ""
        if self.drafts.by_class:
            kv += f", {self.drafts.tokens_per_step:.2f} tokens per decode and step"
        if cached := self.tokens["cached"]:
            kv += f", {cached} prompt tokens cached so far"
        states = ", ".join(f"{count} {state}" for state, count in zip(STATES, self.states, strict=True))
        return (
            f"{self.policy}, mode {self.mode}{f' ({gauges})' if gauges else ''}; steps in {seconds:.0f} s: "
            f"{counts}; {states}{kv}; longest stall {self.longest_stall:.3f} s, {self.evictions} evictions"
        )

    def _make_board(self, about: dict[str, str], engine: int, registry: Any) -> Board | None:
        try:
            board = Board(self, str(engine), about, self._kv_total, registry)
        except ImportError:
            LOG.warning("headgate: no metrics, prometheus_client is not installed; pip install it")
            return None
        except Exception as error:
            LOG.warning("headgate: no metrics: %s: %s", type(error).__name__, error)
            return None
        if self._settings.metrics_port is None:
            return board
        from prometheus_client import REGISTRY, start_http_server

        port = self._settings.metrics_port + engine
        try:  # a port that is taken is no reason to stop
            self._server, _ = start_http_server(port, registry=registry or REGISTRY)
            LOG.info("headgate: metrics on port %d", port)
        except OSError as error:
            LOG.warning("headgate: no metrics on port %d: %s; choose another", port, error.strerror or error)
        return board


class Board:
    def __init__(
        self, tally: Tally, engine: str, about: Mapping[str, str], kv_total: int, registry: Any = None
    ) -> None:
        self._tally, self._engine, self._kv_total = tally, engine, kv_total
        self._about = {"version": VERSION, **about}
        self._metrics = instruments(registry)
        self._shown: Counter[tuple[str, ...]] = Counter()  # counters, by name and labels
        self._chosen: dict[str, tuple[str, ...]] = {}  # which label of a metric is 1
        for kind in KINDS:
            self._of("headgate_steps", kind)

    def collect(self) -> Iterator[Any]:
        for metric in self._metrics.values():
            yield from metric.collect()

    def show(self) -> None:
        tally = self._tally
        self._of("headgate_fallen").set(tally.fallen is not None)  # first: operators are alerted by it
        self._choose("headgate_info", *(self._about | {"policy": tally.policy}).values())
        self._choose("headgate_mode", tally.mode)
        self._choose("headgate_phase", tally.phase)
        gauges = numbers(tally.gauges)
        for name, value in gauges.items():
            self._of("headgate_policy", name).set(value)
        for metric, gauge in (("headgate_threshold", "refill"), ("headgate_slots", "slots")):
            if gauge in gauges:
                self._of(metric).set(gauges[gauge])
        for state, count in zip(STATES, tally.states, strict=True):
            self._of("headgate_requests", state).set(count)
        held = 0 if tally.phase == IDLE else tally.kv
        self._of("headgate_kv_use_ratio").set(held / self._kv_total if self._kv_total else 0.0)
        self._of("headgate_longest_stall_seconds").set(tally.longest_stall)
        self._count()
        self._observe()

    def _count(self) -> None:
        tally = self._tally
        by_label = {
            "headgate_steps": tally.all_steps(),
            "headgate_tokens": tally.tokens,
            "headgate_finished": tally.left,
            "headgate_wasted_tokens": tally.lost,
            "headgate_fallbacks": tally.reasons,
            "headgate_ignored_words": IGNORED,
        }
        for name, counts in by_label.items():
            for label, count in list(counts.items()):
                self._raise(name, count, label)
        for name in ("plans", "rescues", "renewals", "bent_plans"):
            self._raise(f"headgate_{name}", getattr(tally, name))
        by_class = tally.by_class.shown()
        for name in BY_CLASS:
            for labels, count in by_class[name].items():
                self._raise(name, count, *labels)
        for labels, count in by_class[QUEUE].items():
            self._of(QUEUE, *labels).set(count)
        for kind, drafts in list(tally.drafts.by_class.items()):
            name = kind or NO_CLASS
            self._of("headgate_tokens_per_step", name).set(drafts.tokens_per_step)
            self._raise("headgate_drafts", drafts.accepted, name, "true")
            self._raise("headgate_drafts", drafts.drafted - drafts.accepted, name, "false")

    def _observe(self) -> None:
        tally = self._tally
        timed = {"headgate_step_seconds": tally.step_times, "headgate_phase_seconds": tally.phase_times}
        for name, times in timed.items():
            for _ in range(len(times)):
                kind, seconds, steps = times.popleft()
                for _ in range(steps):
                    self._of(name, kind).observe(seconds)
        for _ in range(len(tally.stalls)):
            self._of("headgate_stall_seconds").observe(tally.stalls.popleft())

    def _of(self, name: str, *labels: str) -> Any:
        return self._metrics[name].labels(self._engine, *(label[:LONGEST_REASON] for label in labels))

    def _raise(self, name: str, count: int, *labels: str) -> None:
        key = name, *labels
        more = count - self._shown[key]
        if more > 0:
            self._of(name, *labels).inc(more)
            self._shown[key] = count

    def _choose(self, name: str, *labels: str) -> None:
        before = self._chosen.get(name)
        if before != labels:
            if before is not None:
                self._of(name, *before).set(0)
            self._of(name, *labels).set(1)
            self._chosen[name] = labels


def instruments(registry: Any = None) -> dict[str, Any]:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    registry = registry or REGISTRY
    if registry in _instruments:
        return _instruments[registry]
    metrics: dict[str, Any] = {}
    # Where several processes write to one place, the newest value of each engine counts.
    newest = partial(Gauge, multiprocess_mode="mostrecent")
    tables = (newest, GAUGES), (Counter, COUNTERS), (partial(Histogram, buckets=BUCKETS), HISTOGRAMS)
    for kind, table in tables:
        for name, (help, labels) in table.items():
            metrics[name] = kind(name, help, ("engine", *labels), registry=registry)
    _instruments[registry] = metrics
    return metrics
