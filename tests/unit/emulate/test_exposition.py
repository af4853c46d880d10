"""Metrics are written as prometheus_client writes them, to the last byte."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headgate.live.emulate.metrics import CounterFamily, GaugeFamily, HistogramFamily

NAMES, VALUES = ["model_name", "engine"], ['a "model"\\ \n', "0"]
ROWS, SUM = [("0.5", 2.0), ("+Inf", 3.0)], 12.25


class Theirs(Collector):
    def collect(self):
        families = (GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)
        gauge, counter, histogram = (
            family(name, "About it.", labels=NAMES) for family, name in zip(families, "gch", strict=True)
        )
        gauge.add_metric(VALUES, 7)
        counter.add_metric(VALUES, 0.25)
        histogram.add_metric(VALUES, ROWS, SUM)
        yield from (gauge, counter, histogram)


def test_metrics_are_written_as_prometheus_client_writes_them():
    gauge, counter, histogram = (
        kind(name, "About it.", NAMES)
        for kind, name in zip((GaugeFamily, CounterFamily, HistogramFamily), "gch", strict=True)
    )
    gauge.add_metric(VALUES, 7)
    counter.add_metric(VALUES, 0.25)
    histogram.add_rows(VALUES, ROWS, SUM)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Theirs())
    ours = "".join(family.text() for family in (gauge, counter, histogram))
    assert ours == generate_latest(registry).decode()
