"""Metrics as Prometheus reads them, written directly: a scrape must not make a step late.

prometheus_client took 5 ms for one engine on the machine of docs/emulate.md, a router scrapes many times a
second, and the engine's steps wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Gauge:
    """One metric: its head and a line for each of its label values."""

    kind, suffix = "gauge", ""

    def __init__(self, name: str, about: str, labels: Sequence[str]) -> None:
        self._name, self._labels = name + self.suffix, labels
        self._lines = [f"# HELP {self._name} {about}\n# TYPE {self._name} {self.kind}\n"]

    def add_metric(self, values: Sequence[str], value: float) -> None:
        self._lines.append(f"{self._name}{{{','.join(self._pairs(values))}}} {float(value)}\n")

    def text(self) -> str:
        return "".join(self._lines)

    def _pairs(self, values: Sequence[str]) -> list[str]:
        pairs = zip(self._labels, values, strict=True)
        return sorted(f'{label}="{value.translate(ESCAPES)}"' for label, value in pairs)


class Counter(Gauge):
    """One that only grows."""

    kind, suffix = "counter", "_total"


class Buckets(Gauge):
    """A histogram."""

    kind = "histogram"

    def add_rows(self, values: Sequence[str], rows: Iterable[tuple[str, float]], total: float) -> None:
        """Cumulative counts by upper bound, and the sum of what was counted."""
        pairs, count = self._pairs(values), 0.0
        before = "".join(f"{pair}," for pair in pairs if pair < "le=")
        after = "".join(f",{pair}" for pair in pairs if pair > "le=")
        start, end = f'{self._name}_bucket{{{before}le="', f'"{after}}} '
        for bound, count in rows:
            self._lines.append(f"{start}{bound}{end}{count}\n")
        labels = ",".join(pairs)
        self._lines.append(f"{self._name}_count{{{labels}}} {count}\n")
        self._lines.append(f"{self._name}_sum{{{labels}}} {float(total)}\n")
