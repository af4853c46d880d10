"""Tests against the real vLLM; without it (the fast suite's environment) there is nothing to collect."""

import os
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, Phase, settings

from same_examples import freeze_examples

# Before vLLM is imported anywhere: no network, no statistics, no chatter.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: torch's threads wait by spinning

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "phases": [Phase.explicit, Phase.generate],  # worlds come from a seed: there is nothing to shrink
    "print_blob": False,
}
settings.register_profile("engine", max_examples=12, derandomize=True, **COMMON)
settings.register_profile("engine-long", max_examples=250, **COMMON)
settings.load_profile("engine-long" if os.environ.get("HYPOTHESIS_PROFILE") == "night" else "engine")
freeze_examples()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory, request):
    """A folder for the servers of one file."""
    return tmp_path_factory.mktemp(request.module.__name__.removeprefix("test_"))


@pytest.fixture(scope="module")
def model(scratch):
    """A tiny one with made-up weights."""
    import tiny

    return tiny.model(scratch / "model")
