"""A field of a request is declared once and reaches everything: a measure of how well the record holds.

A copy of the package gets a field `tenant`. Three files change for a simulated engine; a live one needs a
fourth, which says where the value comes from.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import headgate

SOURCE = Path(headgate.__file__).parent
EDITS = {
    "core/request.py": [
        ("    slo: Slo = NO_SLO  #", "    tenant: int = 0\n    slo: Slo = NO_SLO  #"),
        ("        slo: Slo = NO_SLO,\n", "        tenant: int = 0,\n        slo: Slo = NO_SLO,\n"),
        ("self.priority, self.slo = ", "self.priority, self.tenant, self.slo = "),
        (" = kind, guess, priority, slo", " = kind, guess, priority, tenant, slo"),
        (
            "    @property\n    def kind(self)",
            '    @property\n    def tenant(self) -> int:\n        """Whose it is."""\n\n'
            "    @property\n    def kind(self)",
        ),
    ],
    "core/ledger.py": [
        ("        slo: Slo = NO_SLO,\n", "        tenant: int = 0,\n        slo: Slo = NO_SLO,\n"),
        (
            "(self, id, arrival, prompt, limit, kind, guess, priority,",
            "(self, id, arrival, prompt, limit, kind, guess, priority, tenant,",
        ),
        (
            "    prompt, limit, kind, guess, priority, slo = known",
            "    prompt, limit, kind, guess, priority, tenant, slo = known",
        ),
        (
            "Entry(ledger, id, arrival, prompt, limit, kind, guess, priority,",
            "Entry(ledger, id, arrival, prompt, limit, kind, guess, priority, tenant,",
        ),
    ],
    "workloads/workload.py": [
        ("    kinds: tuple[Kind, ...]", "    tenant: Whole\n    kinds: tuple[Kind, ...]"),
    ],
    "workloads/columns.py": [
        (
            '    "priority": Rule(',
            '    "tenant": Rule(True, 0, LONGEST, "a number", 0),\n    "priority": Rule(',
        ),
    ],
}
PROGRAM = """
import json, pathlib, sys
from headgate.core.policy import Observer
from headgate.experiment.library import card_engine, simulate
from headgate.live.engine.trace import Trace
from headgate.methods.mixed.mixed import Mixed
from headgate.record.live_trace import read_live_trace
from headgate.workloads.workload import Workload

class Seen(Observer):
    def __init__(self): self.tenants = []
    def arrived(self, request, now): self.tenants.append(request.tenant)

requests = Workload.of([20, 30, 40], [3, 4, 5], tenant=[7, 8, 7])
requests.save("requests.npz")
seen, trace = Seen(), Trace("live.jsonl", {}, background=False)
engine = card_engine("linear-h200-qwen3-8b", slots=8, budget=512)
run = simulate(engine, Mixed(slots=8, budget=512), requests, observers=(seen, trace))
trace.close()
print(json.dumps({
    "policy": seen.tenants,
    "table": run.requests["tenant"].tolist(),
    "file": Workload.load("requests.npz").tenant.tolist(),
    "trace": read_live_trace("live.jsonl").requests["tenant"].tolist(),
}))
"""


def test_a_new_field_touches_four_files_and_reaches_policies_tables_files_and_traces(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "headgate", ignore=shutil.ignore_patterns("__pycache__"))
    for name, pairs in EDITS.items():
        file = tmp_path / "headgate" / name
        text = file.read_text(encoding="utf-8")
        for old, new in pairs:
            assert text.count(old) == 1, f"{name}: {old!r}"
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == (
        '{"policy": [7, 8, 7], "table": [7, 8, 7], "file": [7, 8, 7], "trace": [7, 8, 7]}'
    )
