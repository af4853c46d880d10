"""A command's screen over time as one SVG that moves: `python tools/record_terminal.py OUT.svg COMMAND...`.

The command runs in tmux; its screen is taken every two seconds. docs/route.svg was made by
`python tools/record_terminal.py docs/route.svg headgate route --demo --seconds 40`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 92, 27
EVERY, LONGEST = 2.0, 30  # seconds between two frames, frames
SOCKET = "headgate-recording"


def tmux(*words: str) -> str:
    """Of a server of our own, so that no session of the user is touched."""
    return subprocess.run(["tmux", "-L", SOCKET, *words], check=True, capture_output=True, text=True).stdout


def screens(command: str) -> list[str]:
    """With their colours; ends with the command."""
    found: list[str] = []
    tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), command)
    try:
        while len(found) < LONGEST:
            time.sleep(EVERY)
            found.append(tmux("capture-pane", "-e", "-p"))
    except subprocess.CalledProcessError:
        pass  # it has ended, and its session with it
    else:
        tmux("kill-server")
    return [screen for screen in found if screen.strip()]


def drawn(screen: str, number: int, title: str) -> str:
    """One frame."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), legacy_windows=False)
    console.print(Text.from_ansi(screen.rstrip("\n"), no_wrap=True))
    for _ in range(ROWS - len(screen.rstrip("\n").splitlines())):
        console.print()
    return console.export_svg(title=title, unique_id=f"f{number}")


def moving(frames: list[str]) -> str:
    """The frames one after the other, for ever; fonts of the reader's machine, nothing is loaded."""
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', frames[0])
    assert size is not None
    width, height = size.groups()
    share, whole = 100 / len(frames), EVERY * len(frames)
    style = (
        f".frame{{visibility:hidden;animation:frame {whole:g}s step-end infinite}}"
        f"@keyframes frame{{0%{{visibility:visible}}{share:.3f}%{{visibility:hidden}}}}"
    )
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{style}</style>']
    for number, frame in enumerate(frames):
        inside = re.sub(r"@font-face \{.*?\}", "", frame, flags=re.S)
        parts.append(f'<g class="frame" style="animation-delay:{EVERY * number:g}s">{inside}</g>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Record."""
    if len(sys.argv) < 3:
        sys.exit(f"error: say where and what; {__doc__}")
    place, command = Path(sys.argv[1]), " ".join(sys.argv[2:])
    frames = [drawn(screen, number, command) for number, screen in enumerate(screens(command))]
    if not frames:
        sys.exit(f"error: {command!r} showed nothing for {EVERY:g} s")
    place.write_text(moving(frames), encoding="utf-8")
    print(f"{place}: {len(frames)} frames, {place.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
