"""Hypothesis profiles (the same examples in every run of CI, more at night), --update-golden, and Ctrl-C."""

import os
import signal

from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=60, derandomize=True, **COMMON)
settings.register_profile("long", max_examples=250, derandomize=True, **COMMON)
settings.register_profile("night", max_examples=2000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A shell starts background jobs deaf to Ctrl-C, and all they start is deaf too; tests of it must hear it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden schedules")
