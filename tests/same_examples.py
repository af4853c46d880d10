"""The same examples wherever tests run: on this machine and in CI, alone, together or in any order.

Hypothesis also draws numbers that it finds in the modules loaded so far, and which those are depends on the
tests that ran before in the same process. `derandomize` does not change that.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis.internal.conjecture import providers


def freeze_examples() -> None:
    """Where a profile promises the same examples, none come from the code; others go on looking there."""
    if settings.default.derandomize:
        nothing = providers._local_constants
        providers._get_local_constants = lambda: nothing
