"""docs/decisions.md: sorted, every number once, with an anchor #dNUMBER; pages name decisions that exist.

Add an entry anywhere as `NUMBER. **Title.** Text`. `pytest --update-golden tests/unit/test_decisions.py` puts
it in its place. A Markdown list would number the entries anew, so they are paragraphs.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "decisions.md"
ENTRY = r'(?:<a id="d\d+"></a>\*\*)?(\d+)\. (?:\*\*)?'
NAMED = r"decisions? ((?:\d+(?:, | to | and )?)+)|decisions\.md#d(\d+)"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]


def entries(text):
    """What stands before the entries, and (number, text) of each as it comes."""
    head, *parts = re.split(f"^(?={ENTRY})", text, flags=re.MULTILINE)[::2]
    return head, [(int(re.match(ENTRY, part)[1]), re.sub(ENTRY, "", part, count=1)) for part in parts]


def sorted_page(text):
    head, found = entries(text)
    shown = [
        f'<a id="d{number}"></a>**{number}. ' + "\n".join(line.strip() for line in said.strip().split("\n"))
        for number, said in sorted(found)
    ]
    return "\n\n".join([head.strip(), *shown]) + "\n"


def test_entries_are_sorted_and_have_anchors(request):
    text = PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        PAGE.write_text(sorted_page(text), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == sorted_page(text), "run pytest --update-golden on this file"


def test_every_number_is_used_once():
    numbers = [number for number, _ in entries(PAGE.read_text(encoding="utf-8"))[1]]
    assert len(numbers) > 200 and sorted(set(numbers)) == numbers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_decisions_that_exist(page):
    known = {number for number, _ in entries(PAGE.read_text(encoding="utf-8"))[1]}
    named = re.findall(NAMED, page.read_text(encoding="utf-8"))
    assert {int(number) for each in named for number in re.findall(r"\d+", " ".join(each))} <= known


def test_an_entry_in_the_form_of_a_list_finds_its_place():
    text = '# Decisions\n\n<a id="d2"></a>**2. B.** Text.\n1. **A.** Two\n   lines.\n'
    assert sorted_page(text) == (
        '# Decisions\n\n<a id="d1"></a>**1. A.** Two\nlines.\n\n<a id="d2"></a>**2. B.** Text.\n'
    )
