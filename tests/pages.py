"""The pages of the documentation as tests read them: blocks of code, commands, links.

In a `console` block a line that begins with `$ headgate` is a command, and what stands under it is what it
prints; with nothing under it only its exit code counts, and a line `...` stands for any lines. A command that
ends in `# takes ...` is too slow for the tests: its words are checked, not its output. The same holds for
commands in other blocks. A block whose first line is a comment with a file's name becomes that file in the
folder where the page's commands run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
OTHER_PAGES = sorted(
    [
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "papers" / "README.md",
        ROOT / "leaderboard" / "README.md",
        ROOT / "rayserve" / "README.md",
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "studies").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
    ]
)
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```\s*?$", re.M | re.S)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?:    [^\n]*\n)+)")
FILE = re.compile(r"^# ([\w.-]+\.(?:py|toml|json|csv))(?:[ :].*)?\n")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
SLOW = re.compile(r"\s+# takes .*$")
REMARK = re.compile(r"\s+#\s.*$")


class Block(NamedTuple):
    """A block of code: what it says it is, what stands in it, and where."""

    kind: str
    text: str
    start: int  # of its text, in the page

    @property
    def file(self) -> tuple[str, str] | None:
        """The file it should become, and what should stand in it: without its name where # is no comment."""
        named = FILE.match(self.text)
        if not named:
            return None
        return named[1], self.text[named.end() :] if named[1].endswith((".csv", ".json")) else self.text


class Command(NamedTuple):
    """A command of a page and what should stand under it."""

    line: str  # without the prompt, continuation lines joined
    slow: bool
    expected: str
    span: tuple[int, int]  # of the expected text, in the page

    @property
    def words(self) -> str:
        """Without the remark behind it."""
        return REMARK.sub("", self.line).removesuffix(" ...").strip()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> list[Block]:
    return [Block(found[1].strip(), found[2], found.start(2)) for found in FENCE.finditer(text)]


def commands(block: Block) -> list[Command]:
    """What a console block runs, in order."""
    found: list[Command] = []
    lines = block.text.splitlines(keepends=True)
    place, offset = 0, block.start
    while place < len(lines):
        line, offset, place = lines[place].rstrip("\n"), offset + len(lines[place]), place + 1
        if not line.startswith("$ "):
            continue
        while line.endswith("\\") and place < len(lines):
            line = line[:-1].rstrip() + " " + lines[place].strip()
            offset, place = offset + len(lines[place]), place + 1
        begin, under = offset, ""
        while place < len(lines) and not lines[place].startswith("$ "):
            under += lines[place]
            offset, place = offset + len(lines[place]), place + 1
        found.append(Command(line[2:], bool(SLOW.search(line)), under, (begin, offset)))
    return found


def quoted(text: str) -> list[str]:
    """Every headgate command on a page, in whatever block, as one line each."""
    parts = [block.text for block in blocks(text)]
    parts += [found[1] for found in INDENTED.finditer(FENCE.sub("\n", text))]
    lines: list[str] = []
    for part in parts:
        whole = re.sub(r"\\\n\s*", "", part)
        lines += [line.strip().removeprefix("$ ") for line in whole.splitlines()]
    lines = [line.removeprefix(".venv/bin/") for line in lines]
    return [
        REMARK.sub("", line).removesuffix("...").strip() for line in lines if line.startswith("headgate ")
    ]


def links(text: str) -> list[str]:
    return [found[1] or found[2] for found in LINK.finditer(FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """The names under which headings can be reached, as the site makes them, and anchors of their own."""
    heads = re.findall(r"^#+ +(.*?)\s*$", FENCE.sub("", text), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    named = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in plain}
    return named.union(re.findall(r'<a id="([^"]+)"></a>', text))
