"""A vLLM plug-in for tests: asynchronous scheduling on a CPU, in every process of a server.

vLLM switches it off on CPUs. Its model runner names CUDA streams and events on this path; here they do
nothing.
"""

from __future__ import annotations

import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

NAME = "headgate_tests"


def install() -> None:
    """Called by vLLM in its front end, engine and workers; may be called again."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    class Stream:
        def __init__(self, *args: Any, **words: Any) -> None:
            self.device = torch.device("cpu")

        def record(self, *args: Any) -> None: ...

        synchronize = wait = wait_stream = wait_event = record

    update = CpuPlatform.check_and_update_config.__func__
    if getattr(update, "stays", False):
        return

    def and_stay(cls: type, config: Any) -> None:
        update(cls, config)
        config.scheduler_config.async_scheduling = True

    and_stay.stays = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(and_stay)
    torch.Event = torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda stream: nullcontext()


def installed_in(folder: Path) -> list[str]:
    """Folders for PYTHONPATH in which vLLM finds this module as one of its plug-ins, and headgate's own."""
    about = folder / f"{NAME}-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    ours = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    plugins = {NAME: f"{Path(__file__).stem}:install", **ours["vllm.general_plugins"]}
    lines = [f"{name} = {path}\n" for name, path in plugins.items()]
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "".join(lines))
    return [str(folder), str(Path(__file__).parent)]
