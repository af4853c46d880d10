"""What the router shows: metrics with bounded labels, and one JSON line a request without prompts or keys."""

from __future__ import annotations

import json
import re
import sys
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headgate.core.errors import InputError
from headgate.live.engine.requests import told_apart
from headgate.live.route.request import RefusedError

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Ended(NamedTuple):
    total: Histogram
    queued: Histogram
    first_token: Histogram
    prompt_tokens: Counter
    output_tokens: Counter


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by class and how they ended", "class", "outcome")
        self.refused = self._counter("refused", "Requests the router answered itself", "reason")
        self.retries = self._counter("retries", "Tries after the first, by what failed before", "fault")
        self.faults = self._counter("leg_faults", "Upstream calls that failed", "engine", "fault")
        self.first_token = self._histogram("first_token_seconds", "Arrival to first token", FIRST)
        self.queued = self._histogram("queue_seconds", "Time in the router's queue", FIRST)
        self.total = self._histogram("request_seconds", "Arrival to last byte", WHOLE)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests", "class")
        self.output_tokens = self._counter("output_tokens", "Output tokens of ended requests", "class")
        told = "Promises kept and broken from arrival here on, of streams"
        self.promises = self._counter("promises", told, "class", "promise", "kept")
        told = "Tokens of ended requests, by tenant"
        self.tenant_tokens = self._counter("tenant_tokens", told, "tenant", "kind")
        told = "Requests the router answered itself, by tenant"
        self.tenant_refused = self._counter("tenant_refused", told, "tenant", "reason")
        self._tenants: set[str] = set()
        self.unstreamed = self._counter("unstreamed", "Requests whose first token was assumed", "class")
        self.handovers = self._counter("kv_handovers", "Decodes sent with KV parameters")
        self.released = self._counter("kv_released", "KV given up, by result", "result")
        self.consumed = self._counter("kv_consumed", "Decodes that went on to release KV without a client")
        self.stripped = self._counter("kv_stripped", "Hand-overs past their deadline")
        self.no_params = self._counter("kv_missing", "Prefills that gave no parameters", "engine")
        self.reloads = self._counter("reloads", "Reloads by result", "result")
        self.estimate = Gauge(
            "headgate_prompt_estimate_error", "Mean relative error of prompt lengths", registry=self.registry
        )
        self.engine = {
            name: Gauge(f"headgate_engine_{name}", text, labels, registry=self.registry)
            for name, text, *labels in (
                ("up", "1 while it may be sent requests", "engine"),
                ("slots", "Requests of ours it may have", "engine"),
                ("legs", "Calls of ours that are open", "engine"),
                ("foreign", "Requests there that are not ours", "engine"),
                ("running", "Its running requests, scraped", "engine"),
                ("waiting", "Its waiting requests, scraped", "engine"),
                ("kv_usage", "Its KV use, 0 to 1, scraped", "engine"),
                ("first_token_seconds", "Mean time to first token there", "engine"),
                ("info", "Where it is", "engine", "url"),
            )
        }
        self.gauges: dict[str, Gauge] = {}
        self._ended: dict[str, Ended] = {}
        self._outcomes: dict[tuple[str, str], Counter] = {}

    def ended(self, kind: str) -> Ended:
        """The metrics of requests of a class that have ended; looking labels up costs more than counting."""
        if (ended := self._ended.get(kind)) is None:
            metrics = (getattr(self, name).labels(kind) for name in Ended._fields)
            ended = self._ended[kind] = Ended(*metrics)
        return ended

    def request_ended(self, kind: str, outcome: str) -> None:
        if (counter := self._outcomes.get((kind, outcome))) is None:
            counter = self._outcomes[kind, outcome] = self.requests.labels(kind, outcome)
        counter.inc()

    def refused_tenant(self, tenant: str, reason: str) -> None:
        self.tenant_refused.labels(told_apart(tenant, self._tenants), reason).inc()

    def served(self, tenant: str, prompt: int, output: int) -> None:
        tenant = told_apart(tenant, self._tenants)
        self.tenant_tokens.labels(tenant, "prompt").inc(prompt)
        self.tenant_tokens.labels(tenant, "output").inc(output)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        if (gauge := self.gauges.get(name)) is None:
            gauge = self.gauges[name] = Gauge(f"headgate_{name}", name, list(labels), registry=self.registry)
        (gauge.labels(**labels) if labels else gauge).set(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"headgate_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"headgate_{name}", text, ["class"], buckets=buckets, registry=self.registry)


# -- access log and trace

CONTROL = re.compile(r"[^\x20-\x7e]")
LONGEST = 128
FLUSH_EVERY = 64  # lines


def clean(text: str) -> str:
    """A text from outside, fit for a log: printable ASCII, at most 128 characters."""
    return CONTROL.sub("?", text[:LONGEST])


def refusal_record(wall: float, seconds: float, path: str, id: str, refused: RefusedError) -> dict[str, Any]:
    return {
        "time": round(wall, 3),
        "id": clean(id),
        "key": refused.key,
        "class": "",
        "path": clean(path),
        "status": refused.status,
        "outcome": "refused",
        "fault": refused.reason,
        **({"client": refused.client} if refused.client else {}),
        "total_ms": round(1000 * seconds, 3),
    }


class JsonLines:
    """Whole lines are written at once: processes may share a file. A full disk stops only the log."""

    def __init__(self, path: str | None) -> None:
        self.lost = 0
        self._file: BinaryIO | RawIOBase | None = None
        self._lines: list[bytes] = []
        if path == "-":
            self._file = sys.stdout.buffer
        elif path is not None:
            try:
                self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 (open as long as the router runs)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise InputError(f"{path}: cannot be written, {why}; choose another file") from None

    @property
    def wanted(self) -> bool:
        return self._file is not None

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._lines.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        except ValueError:
            self.lost += 1
        if len(self._lines) >= FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        try:
            if self._file is not None and lines:
                self._file.write(b"".join(lines))
                self._file.flush()
        except (OSError, ValueError):
            self.lost += len(lines)

    def close(self) -> None:
        self.flush()
        if self._file is not None and self._file is not sys.stdout.buffer:
            self._file.close()
