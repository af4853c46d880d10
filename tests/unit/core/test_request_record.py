"""What a request brings with it is declared once and reaches policies, tables, files and traces."""

from __future__ import annotations

import pytest

from headgate.core.policy import Observer
from headgate.core.request import Identity, Slo, weight_of
from headgate.experiment.build import as_workload
from headgate.experiment.library import card_engine, simulate
from headgate.live.engine.trace import Trace
from headgate.methods.mixed.mixed import Mixed
from headgate.record.live_trace import read_live_trace
from headgate.workloads.workload import Kind, Workload


class Seen(Observer):
    def __init__(self) -> None:
        self.requests = []

    def arrived(self, request, now):
        self.requests.append((request.tenant, request.slo.weight, request.slo.background))


def test_tenants_weights_and_background_reach_policies_tables_files_and_traces(tmp_path):
    kinds = (Kind("gold", Slo(0.5, None, weight=10.0)), Kind("batch", Slo(background=True)))
    columns = {"kind": [0, 1, 0], "tenant": [1, 0, 1], "tenants": ("ann", "bob")}
    requests = Workload.of([20, 30, 40], [3, 4, 5], kinds=kinds, **columns)
    seen, trace = Seen(), Trace(tmp_path / "live.jsonl", {}, background=False)
    engine = card_engine("linear-h200-qwen3-8b", slots=8, budget=512)
    run = simulate(engine, Mixed(slots=8, budget=512), requests, observers=(seen, trace))
    trace.close()
    assert seen.requests == [("bob", 10.0, False), ("ann", None, True), ("bob", 10.0, False)]
    assert (run.tenants, run.requests["tenant"].tolist()) == (["ann", "bob"], [1, 0, 1])
    assert run.to_dataframe(library="numpy")["tenant"].tolist() == ["bob", "ann", "bob"]
    live = read_live_trace(tmp_path / "live.jsonl")
    assert [live.tenants[number] for number in live.requests["tenant"]] == ["bob", "ann", "bob"]
    again = as_workload(live, tmp_path / "live.jsonl")
    assert [again.tenants[number] for number in again.tenant] == ["bob", "ann", "bob"]
    assert {kind.name: kind.slo for kind in again.kinds} == {kind.name: kind.slo for kind in kinds}


def test_without_tenants_and_weights_a_record_says_nothing_of_them():
    requests = Workload.of([20, 30], [3, 4])
    run = simulate(card_engine("linear-h200-qwen3-8b", slots=8), "mixed", requests)
    assert "tenant" not in run.requests and "tenants" not in run.meta
    assert [*run.kinds[0]] == ["name", "first_token", "between_tokens", "between_kind"]


@pytest.mark.parametrize(
    ("weight", "priority", "worth"),
    [
        (None, 0, 1.0),
        (None, 1, 0.1),
        (None, -2, 100.0),
        (3.0, 5, 3.0),
        (None, 10**9, 1e-6),
        (None, -400, 1e6),
    ],
)
def test_a_priority_without_a_weight_counts_tenfold_a_step(weight, priority, worth):
    request = Identity(0, 0.0, 10, 10, priority=priority, slo=Slo(weight=weight))
    assert weight_of(request) == pytest.approx(worth)


def test_merging_keeps_whose_request_each_is():
    ann = Workload.of([10], [2], arrival=[1.0], tenants=("ann",))
    both = Workload.of([20, 30], [2, 2], arrival=[0.0, 2.0], tenant=[0, 1], tenants=("bob", "ann"))
    merged = ann.merge(both)
    assert [merged.tenants[number] for number in merged.tenant] == ["bob", "ann", "ann"]
