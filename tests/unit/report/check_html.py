"""A strict reader of what a report may contain: every element closed, nothing fetched from elsewhere."""

from __future__ import annotations

import json
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "input"}


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.seen: dict[str, int] = {}
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        assert len(self.ids) == len(set(self.ids)), "an id is there twice"

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script" and ("type", "application/json") in attrs:
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "script" and self.scripts and not self.scripts[-1]:
            self.scripts[-1] = data
        elif not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> list[dict]:
        return [json.loads(script) for script in self.scripts]


def read(text: str) -> Reader:
    """Checked: well formed, one file, nothing that a browser would fetch."""
    assert text.startswith("<!doctype html>")
    found = Reader(text)
    for tag, name, value in found.attributes:
        assert name not in ("src", "href", "action", "poster", "srcset", "onclick", "onload"), (tag, name)
        assert "url(" not in value
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in outside and "https://" not in outside and "@import" not in outside
    return found
