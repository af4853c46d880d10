"""Does the built site need anything from elsewhere? Nothing it loads may come from another host."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

LOADS = {  # tag to the attributes whose address a browser fetches by itself
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "use": ("href", "xlink:href"),
}
QUIET = ("canonical", "alternate")  # kinds of link that say something and fetch nothing


class Loads(HTMLParser):
    """The addresses a page fetches from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A tag that may load something."""
        given = {name: value or "" for name, value in attrs}
        if given.get("rel") in QUIET:
            return
        for name in LOADS.get(tag, ()):
            address = given.get(name, "")
            if address.startswith(("http:", "https:", "//")):
                self.elsewhere.append(f"<{tag} {name}={address}>")


def foreign(site: Path) -> list[str]:
    """Everything pages and style sheets would fetch from elsewhere."""
    found: list[str] = []
    for page in sorted(site.rglob("*.html")):
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(site)}: {what}" for what in loads.elsewhere]
    for sheet in sorted(site.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8")
        if "url(http" in text or "url(//" in text or "@import" in text:
            found.append(f"{sheet.relative_to(site)}: loads from elsewhere")
    return found


def main() -> int:
    """Exit code 1 and a list when something comes from elsewhere."""
    site = Path(sys.argv[1])
    pages = len(list(site.rglob("*.html")))
    found = foreign(site)
    for line in found:
        print(line)
    print(f"{site}: {pages} pages, {len(found)} things from other hosts")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
