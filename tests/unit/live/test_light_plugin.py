"""What the plug-in loads into vLLM's process: the policy in use and no other, and no scipy for it."""

import subprocess
import sys

import pytest

LOADED = """
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Fake(ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Vllm(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "vllm" else None

    def create_module(self, spec):
        return Fake(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Vllm())
import headgate.live.vllm.factory
from headgate.live.engine.settings import Settings
from headgate.live.engine.policy import build_policy
from headgate.live.vllm import VLLM

limits = dict(kv_tokens=400_000, block=16, max_model_len=4096, batch_tokens=8192, running=256)
build_policy(Settings(policy=sys.argv[1]), VLLM, **limits)
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("headgate", "scipy")))
"""
OTHERS = {"mixed": ("eb", "keep.policy", "wait", "rad", "slai"), "auto": ("wait", "rad", "slai", "fluid")}


@pytest.mark.parametrize(("policy", "most"), [("mixed", 63), ("eb:refill=4", 66), ("auto", 82)])
def test_only_the_policy_in_use_is_loaded(policy, most):
    ran = subprocess.run([sys.executable, "-c", LOADED, policy], capture_output=True, text=True, check=True)
    modules = ran.stdout.split()
    assert not [name for name in modules if name.startswith("scipy")]
    assert len(modules) <= most, modules
    for other in OTHERS.get(policy, ()):
        assert not [name for name in modules if name.startswith(f"headgate.methods.{other}")]
