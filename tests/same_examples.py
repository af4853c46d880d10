"""The same examples wherever tests run: on this machine and in CI, alone, together or in any order.

Hypothesis also draws numbers that it finds in the modules loaded so far, and which those are depends on the
tests that ran before in the same process. `derandomize` does not change that.
"""

from __future__ import annotations

import hypothesis
from hypothesis.internal.conjecture import providers

LOOKS = (
    "_get_local_constants"  # not for users: requirements-dev.txt and requirements-vllm.txt pin the release
)


def freeze_examples() -> None:
    """Where a profile promises the same examples, none come from the code; others go on looking there."""
    if not hypothesis.settings.default.derandomize:
        return
    if not hasattr(providers, LOOKS):
        raise RuntimeError(
            f"hypothesis {hypothesis.__version__} has no {LOOKS}: see how it finds numbers in modules now, "
            "or install the release of requirements-dev.txt"
        )
    nothing = providers.Constants()
    setattr(providers, LOOKS, lambda: nothing)
