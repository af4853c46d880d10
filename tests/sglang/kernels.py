"""Stands in for what SGLang imports and a machine without a GPU does not have."""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import ClassVar
from unittest.mock import MagicMock

ABSENT = frozenset((
    "IPython", "anthropic", "blobfile", "compressed_tensors", "cutlass", "deep_ep", "deep_gemm",
    "easydict", "flashinfer", "gguf", "humming", "llguidance", "modelscope", "numba", "nvidia",
    "openai_harmony", "outlines", "py_spy", "pynvml", "quack", "sgl_deep_gemm", "sgl_flash_mla",
    "sgl_kernel", "smg_grpc_servicer", "tilelang", "torch_memory_saver", "torchaudio", "torchvision",
))  # fmt: skip


class StandIn(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=name))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module): ...


def stand_in() -> None:
    """Once, before SGLang is imported. transformers goes first: it must see what is really there."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoProcessor  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    sys.meta_path.append(Finder())
