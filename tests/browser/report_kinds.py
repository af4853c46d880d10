"""Every kind of report there is; `conftest.py` makes one of each."""

from __future__ import annotations

RUNS = ("compare", "classes", "fleet", "loads", "one")
PLANS = ("threshold", "fluid", "capacity", "engines", "wait", "flags", "advise")
KINDS = (*RUNS, *PLANS, "reproduce")
