"""Ends vLLM and removes its temporary folder when `headgate serve` is killed and cannot do so itself."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

GRACE = 60  # seconds vLLM has to end by itself
# Reads the group, then waits: a second line says that all is done, the end of the pipe that its writer died.
WATCH = """
read -r group
read -r finished && exit 0
if [ -n "$group" ]; then
    kill -TERM "-$group" 2>/dev/null
    waited=0
    while kill -0 "-$group" 2>/dev/null && [ "$waited" -lt "$2" ]; do sleep 1; waited=$((waited + 1)); done
    kill -KILL "-$group" 2>/dev/null
fi
rm -rf -- "$1"
"""


class Reaper:
    """A small shell that outlives this process, whatever happens to it; without a shell nothing watches."""

    def __init__(self, folder: str, grace: int = GRACE) -> None:
        ours, theirs = os.pipe()
        self._pipe = theirs
        try:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                ["/bin/sh", "-c", WATCH, "headgate-reaper", folder, str(grace)],
                stdin=ours,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # signals of the terminal do not reach it
            )
        except OSError:
            self._child = None
        os.close(ours)

    def watch(self, group: int) -> None:
        """This process group ends with us."""
        self._say(str(group))

    def close(self) -> None:
        """All is done: nothing to end, nothing to remove."""
        self._say("done")
        os.close(self._pipe)
        if self._child is not None:
            self._child.wait()

    def _say(self, line: str) -> None:
        with suppress(OSError):  # somebody ended it: then nothing is watched
            os.write(self._pipe, f"{line}\n".encode())
