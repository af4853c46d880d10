"""Work beside the engine: done every so often by a thread of its own, and once more when the process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.util import Finalize

from headgate.live.vllm.fields import LOG

PATIENCE = 5.0  # seconds the end of the process waits for work under way, such as a slow disk


class Background:
    """Calls `work` every `every` seconds until `close`; the engine never waits for it.

    Work that fails is logged the first time and tried again: a metric that cannot be shown must not hide the
    others for good.
    """

    def __init__(self, work: Callable[[], None], every: float, name: str) -> None:
        self._work, self._every, self._name = work, every, name
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headgate-{name}", daemon=True)
        self._thread.start()
        # Unlike atexit this also runs in processes that multiprocessing forked, as vLLM's engine core may be.
        self._exit = Finalize(None, self.close, exitpriority=10)

    def close(self) -> None:
        """Do the work once more and stop. May be called again."""
        self._exit.cancel()
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)

    @property
    def busy(self) -> bool:
        """Is it still at work, although it was closed? A disk may hang for ever."""
        return self._thread.is_alive() and self._thread is not threading.current_thread()

    def _run(self) -> None:
        told = False
        ended = False
        while not ended:
            ended = self._end.wait(self._every)
            try:
                self._work()
            except Exception as error:
                if not told:
                    kind = type(error).__name__
                    LOG.warning("headgate: %s failed and is tried again: %s: %s", self._name, kind, error)
                told = True
