"""Hypothesis profiles, --update-golden, and what tests must not notice of where they run."""

import os
import signal

from hypothesis import HealthCheck, settings

from same_examples import freeze_examples

COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
}
settings.register_profile("ci", max_examples=25, derandomize=True, **COMMON)
settings.register_profile("long", max_examples=250, derandomize=True, **COMMON)
settings.register_profile("random", max_examples=250, **COMMON)  # worlds by --hypothesis-seed
settings.register_profile("night", max_examples=2000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
freeze_examples()

# Some CI systems, and some people, ask every program for colours or another width.
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "HEADGATE_CONFIG"):
    os.environ.pop(name, None)
os.environ["COLUMNS"] = "80"

# A shell starts background jobs deaf to Ctrl-C, and all they start is deaf too; tests of it must hear it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden schedules")
