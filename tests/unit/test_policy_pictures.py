"""The pictures on the pages of policies are what the simulator makes now, and show what it did."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import policy_pictures
from tools.policy_pictures import GAP, PAGES, POLICIES, REQUESTS, Schedule, Step

DOCS = PAGES.parent


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return policy_pictures.pictures()


def test_committed_pictures_are_up_to_date(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        committed = (PAGES / name).read_text(encoding="utf-8")
        assert committed == text, f"run python -m tools.policy_pictures: {name}"


def test_each_stands_alone_and_is_shown(drawn: dict[str, str]) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    for name, text in drawn.items():
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg") and "prefers-color-scheme:dark" in text
        assert len(text) < 40_000 and "<script" not in text and "href" not in text
        assert f"{name})" in pages, name


@pytest.mark.parametrize("name", POLICIES)
def test_every_token_is_in_the_schedule(name: str) -> None:
    happened = policy_pictures.schedule(POLICIES[name][0])
    for request, (arrival, _, output, _) in enumerate(REQUESTS):
        tokens = happened.tokens(request)
        assert len(tokens) == output and arrival < happened.of(request)[0].end <= tokens[0]


def test_each_shows_its_idea_on_these_requests() -> None:
    mixed, keep, eb, slai = (
        policy_pictures.schedule(POLICIES[name][0]) for name in ("mixed", "keep", "eb", "slai")
    )
    chat = [number for number, row in enumerate(REQUESTS) if row[3] == 0]
    assert not any(map(keep.late, chat)) and any(map(mixed.late, chat))
    assert mixed.evictions and {REQUESTS[number][3] for number, _ in keep.evictions} == {1}  # batch gives way
    assert not any(step.prompts and step.decodes for step in eb.steps)
    assert mixed.longest_gap(0) < slai.longest_gap(0) <= GAP


def test_gaps_are_between_tokens() -> None:
    """A prompt in two pieces, a decode, a pause, a decode; then evicted, and prefilled in two pieces."""
    own, none = frozenset({0}), frozenset[int]()
    rows = [(0, 1, own, none), (1, 2, own, own), (2, 3, none, own), (5, 6, none, own)]
    happened = Schedule([Step(*row) for row in rows])
    assert (happened.tokens(0), happened.longest_gap(0)) == ([2, 3, 6], 3)
    happened.steps += [Step(7, 9, own, none), Step(9, 10, own, own)]
    assert happened.longest_gap(0) == 4 and happened.steps[-1].decodes == none


def test_the_command_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_pictures, "PAGES", tmp_path)
    policy_pictures.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(policy_pictures.pictures())
