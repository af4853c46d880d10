"""Every kind of report there is; `conftest.py` makes one of each."""

from __future__ import annotations

KINDS = ("compare", "classes", "loads", "one", "threshold", "fluid", "capacity", "wait", "flags", "reproduce")
