"""Tests against the real SGLang; without it (the fast suite's environment) there is nothing to collect."""

import os
from importlib.util import find_spec

from hypothesis import HealthCheck, Phase, settings

from same_examples import freeze_examples

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: its threads wait by spinning
HERE = (spec := find_spec("sglang")) is not None and spec.origin is not None  # this folder has the same name
collect_ignore_glob = [] if HERE else ["test_*.py"]
if HERE:
    import kernels

    kernels.stand_in()

COMMON = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],  # worlds come from a seed: there is nothing to shrink
    "print_blob": False,
}
WORLDS = int(os.environ.get("WORLDS", "0"))  # so many in each test; a seed by --hypothesis-seed
settings.register_profile("sglang", max_examples=WORLDS or 25, derandomize=not WORLDS, **COMMON)
settings.load_profile("sglang")
freeze_examples()
