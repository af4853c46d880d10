"""The entry point of the group `sglang.srt.plugins`: our scheduler stands where SGLang builds its own."""

from __future__ import annotations

import os
import sys

SCHEDULER = "sglang.srt.managers.scheduler"
CONFIG = "HEADGATE_CONFIG"


def register() -> None:
    """SGLang calls it in each of its processes: launcher, detokenizer, schedulers. Only the last import the
    scheduler's module before; elsewhere nothing may be imported, because prometheus_client must not come
    before SGLang has set PROMETHEUS_MULTIPROC_DIR.

    SGLang only logs what a plug-in raises, and serves without it. `SystemExit` is no `Exception`: it ends the
    process, and with it the server.
    """
    if not os.environ.get(CONFIG) or SCHEDULER not in sys.modules:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from headgate.live.sglang.scheduler import HeadgateScheduler

        HookRegistry.register(f"{SCHEDULER}.Scheduler", HeadgateScheduler, HookType.REPLACE)
    except Exception as error:
        from headgate.core.errors import one_line
        from headgate.live.sglang.seams import problem

        why = problem() or one_line(error)
        print(f"headgate: cannot run in this SGLang: {why}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
