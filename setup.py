"""Optional compiled build: HEADGATE_COMPILE=1 compiles the hot modules with mypyc; without it nothing is.

So the dependencies are here, because a compiled build needs one more. Everything else about the package is in
pyproject.toml.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

COMPILER = "mypy>=2.4,<3"
RUNTIME = "librt>=0.16,<1"  # numbers as bytes, for compiled code
SIMULATOR = ["numpy>=1.26", "scipy>=1.11", "highspy>=1.7", "pydantic>=2.5", "typer>=0.12", "rich>=13"]
# Router, emulator and metrics: every command runs after pip install. vLLM brings these packages anyway.
SERVERS = ["aiohttp>=3.12", "msgspec>=0.18", "prometheus-client>=0.18"]
EXACT = "-ffp-contract=off"  # a * b + c rounded once, gcc's default on ARM, is not what Python gives
DIRECT = "-fno-semantic-interposition"  # functions of the library may be inlined, nobody replaces them
# What runs for every step or request. Classes that users subclass and whose class attributes they override
# (BatchPolicy, Observer, StepCost) and data that pydantic fills stay interpreted.
MODULES = (
    "core/dispatch",
    "core/ledger",
    "core/plan",
    "core/listeners",
    "core/request",
    "core/roster",
    "estimators/averages",
    "kv/blocks",
    "kv/prefix",
    "kv/siblings",
    "cost/laws/linear",
    "cost/laws/work",
    "sim/engine/simulator",
    "sim/engine/asynchronous",
    "sim/engine/replica",
    "sim/engine/steps",
    "sim/engine/bursts",
    "sim/fleet/fleet",
    "sim/fleet/fleet_engine",
    "sim/fleet/kv_handover",
    "record/compiled_rows",
    "record/recorder",
    "methods/orders",
    "methods/mixed/mixed",
    "methods/balance/balance",
    "methods/split/split",
    "methods/eb/exclusive",
    "methods/eb/adaptive",
    "methods/eb/hybrid",
    "methods/keep/step",
    "methods/keep/order",
    "methods/keep/policy",
    "methods/slai",
    "live/engine/events",
    "live/engine/live",
    "live/engine/tally",
    "live/vllm/hooks",
    "live/vllm/knobs",
    "live/vllm/request_map",
)


WANTED = os.environ.get("HEADGATE_COMPILE", "") not in ("", "0")


def extensions() -> list[Extension]:
    """The compiled modules; none unless they are asked for and built now, not just described."""
    if not WANTED or not {"bdist_wheel", "build_ext", "build"} & set(sys.argv):
        return []
    from mypyc.build import mypycify

    os.environ["MYPYPATH"] = "src"
    files = [str(Path("src", "headgate", f"{name}.py")) for name in MODULES]
    flags = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    found = mypycify([*flags, *files], opt_level="3", debug_level="0", group_name="headgate")
    for extension in found:
        extension.extra_compile_args += EXACT, DIRECT
    return found


if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        setup_requires=[COMPILER] if WANTED else [],
        install_requires=[*SIMULATOR, *SERVERS, *([RUNTIME] if WANTED else [])],
    )
