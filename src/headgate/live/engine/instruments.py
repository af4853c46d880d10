"""The Prometheus metrics: their names, their help, and how a tally is shown on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from headgate.core.version import VERSION
from headgate.live.engine.gauges import numbers
from headgate.live.engine.tally import IDLE, KINDS, STATES, Tally
from headgate.live.vllm.requests import BAD

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Name: help, labels beside `engine`. Gauges:
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "headgate_info": ("What is on; always 1.", ("version", "policy", "card", "model")),
    "headgate_mode": (
        "1 for what decides now: the policy, one of the two ways of eb+, or fallback.",
        ("mode",),
    ),
    "headgate_fallen": ("1 when vLLM decides alone because the policy failed.", ()),
    "headgate_phase": ("1 for the kind of the newest step, or idle.", ("phase",)),
    "headgate_policy": ("The policy's own numbers: threshold, seats, estimates.", ("gauge",)),
    "headgate_threshold": ("Idle seats that start a refill (k of EB).", ()),
    "headgate_slots": ("Requests the policy lets run at once.", ()),
    "headgate_requests": ("Requests here, by state.", ("state",)),
    "headgate_kv_use_ratio": ("KV held, as a share of all.", ()),
    "headgate_longest_stall_seconds": ("The longest gap of a decode that was held.", ()),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "headgate_steps": ("Steps, by what ran in them.", ("kind",)),
    "headgate_tokens": ("Tokens scheduled; cached: prompt tokens found in the prefix cache.", ("kind",)),
    "headgate_plans": ("Times the policy was asked.", ()),
    "headgate_finished": ("Requests that left, by how.", ("how",)),
    "headgate_evictions": ("Requests whose KV was dropped.", ()),
    "headgate_wasted_tokens": ("Tokens computed in vain, by cause.", ("cause",)),
    "headgate_rescues": ("Plans whose prompts the engine all refused.", ()),
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
_made: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def instruments(registry: Any = None) -> dict[str, Any]:
    """The metrics in a registry (prometheus_client's own by default), made when first asked for."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    registry = registry or REGISTRY
    if registry in _made:
        return _made[registry]
    found: dict[str, Any] = {}
    for name, (help, labels) in GAUGES.items():
        # Where several processes write to one place, the newest value of each engine counts.
        found[name] = Gauge(
            name, help, ("engine", *labels), registry=registry, multiprocess_mode="mostrecent"
        )
    for name, (help, labels) in COUNTERS.items():
        found[name] = Counter(name, help, ("engine", *labels), registry=registry)
    for name, (help, labels) in HISTOGRAMS.items():
        found[name] = Histogram(name, help, ("engine", *labels), registry=registry, buckets=BUCKETS)
    _made[registry] = found
    return found


class Board:
    """Shows a tally on the metrics. Counters get what has been added since the last time."""

    def __init__(
        self, tally: Tally, engine: str, about: Mapping[str, str], kv_total: int, registry: Any = None
    ) -> None:
        self._tally, self._engine, self._kv_total = tally, engine, kv_total
        self._about = {"version": VERSION, **about}
        self._metrics = instruments(registry)
        self._shown: Counter[tuple[str, str]] = Counter()  # counters, by name and label
        self._chosen: dict[str, tuple[str, ...]] = {}  # which label of a metric is 1
        for kind in KINDS:
            self._of("headgate_steps", kind)

    def collect(self) -> Iterator[Any]:
        """Every metric, as a registry hands them out."""
        for metric in self._metrics.values():
            yield from metric.collect()

    def show(self) -> None:
        """Everything as it is now."""
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
            "headgate_ignored_words": BAD,
        }
        for name, counts in by_label.items():
            for label, count in list(counts.items()):
                self._raise(name, count, label)
        for name in ("plans", "evictions", "rescues", "renewals"):
            self._raise(f"headgate_{name}", getattr(tally, name))

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
        key = name, "".join(labels)
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
