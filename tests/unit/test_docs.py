"""What the documentation says can be done can be done, and prints what stands there."""

from __future__ import annotations

import io
import os
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import typer
import yaml

from headgate import __version__
from headgate.cli import app, main
from headgate.cost.card import DERIVED_CARD, list_cards, load_card
from headgate.methods.make import policy_parameters, split_name
from headgate_papers import EXPERIMENTS
from pages import OTHER_PAGES, PAGES, ROOT, Command, anchors, blocks, commands, links, name_of, quoted
from same import assert_alike

COMMANDS = typer.main.get_command(app)
RUNNERS = ("headgate", "pip", "make", "curl", "vllm", "python", "HEADGATE_CONFIG=headgate.toml")


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a line in the page's own folder: what it printed on both streams, and its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)  # searches begin from nothing
    monkeypatch.setattr("headgate.cli.app", COMMANDS)

    def run(line: str) -> tuple[str, int]:
        monkeypatch.setattr("sys.argv", shlex.split(line))
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit) as left:
            main()
        assert isinstance(left.value.code, int)
        return out.getvalue(), left.value.code

    return run


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_and_commands_run_and_print_what_stands_there(page, shell, tmp_path, request):
    text, here = page.read_text(), {"__name__": "page"}
    printed: list[tuple[tuple[int, int], str]] = []
    for block in blocks(text):
        if block.file:
            name, inside = block.file
            (tmp_path / name).write_text(inside)
        if block.kind == "python":
            _run_code(block.text, name_of(page), here)
        for command in commands(block) if block.kind == "console" else ():
            assert command.line.startswith(RUNNERS), f"nobody checks: {command.line}"
            if command.line.startswith("headgate ") and not command.slow:
                printed.append((command.span, _run_command(command, shell)))
    if request.config.getoption("--update-golden"):
        _rewrite(page, text, printed)


def _run_code(code: str, where: str, here: dict[str, object]) -> None:
    """Runs a block; blocks of a page share their names. Every line it prints stands in a comment of it."""
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(code, where, "exec"), here)
    comments = [line.partition("# ")[2].strip() for line in code.splitlines() if "# " in line]
    for line in out.getvalue().splitlines():
        assert any(_alike(line, comment) for comment in comments), f"{where} printed {line!r}"


def _alike(printed: str, expected: str) -> bool:
    try:
        assert_alike(printed, expected)
    except (AssertionError, ValueError):
        return False
    return True


def _run_command(command: Command, shell) -> str:
    """Runs it and compares; in the end what it printed."""
    out, code = shell(command.words)
    out = re.sub(r".*: begun; the next line in 30 s\n", "", out)  # not at a terminal
    if command.expected and not pytest.updating:
        _compare(out, command.expected, command.line)
    told = "headgate: " in command.expected or "BROKEN" in command.expected or pytest.updating
    assert code == 0 or told, f"{command.line}: exit code {code}: {out}"
    return out


def _compare(out: str, expected: str, line: str) -> None:
    """All of it; or, where lines of three dots stand, the parts between them one after the other."""
    first, *parts = expected.split("...\n")
    printed, place = out.split(), len(first.split())
    whole = printed if not parts else printed[:place]
    assert _alike(" ".join(whole), first), f"{line} printed\n{out}"
    for part in parts:
        words = part.split()
        starts = range(place, len(printed) - len(words) + 1)
        ends = [at + len(words) for at in starts if _alike(" ".join(printed[at : at + len(words)]), part)]
        assert ends, f"{line} printed\n{out}"
        place = ends[0]


def _rewrite(page: Path, text: str, printed: list[tuple[tuple[int, int], str]]) -> None:
    for (begin, end), out in reversed(printed):
        if text[begin:end] and "...\n" not in text[begin:end]:
            text = text[:begin] + "\n".join(line.rstrip() for line in out.splitlines()) + "\n" + text[end:]
    page.write_text(text)


@pytest.fixture(autouse=True)
def _updating(request, monkeypatch):
    monkeypatch.setattr(pytest, "updating", request.config.getoption("--update-golden"), raising=False)


SMALLER = {
    "--requests": "60",
    "--seeds": "1",
    "--jobs": "1",
}  # of a slow command, to see how its output looks


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_slow_commands_print_what_looks_like_that(page, shell):
    """The same with few requests: every heading down to the first table's rule is still printed."""
    text = page.read_text()
    slow = [c for b in blocks(text) if b.kind == "console" for c in commands(b) if c.slow and c.expected]
    for name, inside in [block.file for block in blocks(text) if slow and block.file]:
        Path(name).write_text(inside)
    for command in slow:
        words = shlex.split(command.words)
        if words[1] not in ("simulate", "compare", "plan"):
            continue
        small = [SMALLER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        small += [] if "--requests" in words else ["--requests", SMALLER["--requests"]]
        out, code = shell(shlex.join(small))
        assert code == 0, f"{command.line}: {out}"
        printed = set(out.split())
        for line in command.expected.split("───")[0].splitlines():
            missing = [word for word in line.split() if word.isalpha() and word not in printed]
            assert not missing, f"{command.line} no longer says {missing}"


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=name_of)
def test_every_command_on_a_page_exists_with_its_flags(page):
    text = page.read_text()
    run = {c.words for b in blocks(text) if b.kind == "console" for c in commands(b) if not c.slow}
    for line in quoted(text):
        words = shlex.split(line)[1:]
        if words and line not in run:  # else it is run for real, and some are wrong on purpose
            _check_words(_parse(words), line)


def _parse(words: list[str]) -> dict[str, object]:
    """The values a command would get; a flag or a command that does not exist is an error."""
    context, command = COMMANDS.make_context("headgate", list(words)), COMMANDS
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return {}
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return {"command": context.info_name, **context.params}


def _check_words(values: dict[str, object], line: str) -> None:
    policies = values.get("policy") or ()
    for policy in [policies] if isinstance(policies, str) else policies:
        name, settings = split_name(policy)
        if ".py:" not in name and name not in ("all", "vllm"):
            assert set(settings) <= set(policy_parameters(name)), line
    if values.get("command") == "reproduce" and values["name"] not in (None, "NAME"):
        assert values["name"] in EXPERIMENTS, line
    card = values.get("card")
    if card is not None and not str(card).endswith(".json"):
        assert str(card).startswith(DERIVED_CARD) or card in list_cards(), line
        load_card(card)


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=name_of)
def test_links_lead_somewhere(page):
    for link in links(page.read_text()):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name_of(page)}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text()), f"{name_of(page)}: no heading for {link}"


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=name_of)
def test_files_that_a_page_names_are_there(page):
    roots = [ROOT, ROOT / "src", ROOT / "src" / "headgate", ROOT / "papers" / "headgate_papers"]
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()):
        assert any((root / name).exists() for root in roots), f"{name_of(page)}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lists_and_tables_are_seen_as_such(page):
    """The site's Markdown wants an empty line before a list or a table; others do not care."""
    before, fenced = "", False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        for mark in ("- ", "1. ", "|"):
            fresh = not before.startswith((mark, "  ")) if mark != "1. " else not before[:1].isdigit()
            if not fenced and line.startswith(mark) and before and fresh:
                raise AssertionError(f"{name_of(page)}:{number}: no empty line before {line[:40]!r}")
        before = line


def test_a_wrong_page_is_noticed(shell, tmp_path, monkeypatch):
    """The checks above can fail: each on a page that is wrong in one way."""
    monkeypatch.setattr(pytest, "updating", False)
    with pytest.raises(AssertionError, match="printed"):
        _run_code("print(1 + 1)  # 3", "page", {})
    command = Command("headgate --version", False, "headgate 9.9.9 and more", (0, 0))
    with pytest.raises(AssertionError, match="printed"):
        _run_command(command, shell)
    with pytest.raises(Exception, match="No such option"):
        _parse(["simulate", "--no-such-flag"])
    with pytest.raises(Exception, match="No such command"):
        _parse(["simulated"])
    (block,) = blocks("text\n```console\n$ headgate a \\\n    --b   # takes 3 s\nout\n$ headgate c\n```\n")
    first, second = commands(block)
    assert (first.words, first.slow, first.expected) == ("headgate a --b", True, "out\n")
    assert (second.words, second.slow, second.expected) == ("headgate c", False, "")


def test_error_lines_on_the_page_are_those_of_the_code():
    """Every message in the first column of the tables of messages, but for what stands as `...`."""
    places = (ROOT / "src", ROOT / "leaderboard" / "headgate_leaderboard")
    code = "".join(path.read_text() for place in places for path in sorted(place.rglob("*.py")))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # long messages are written as several strings
    page = (ROOT / "docs" / "commands.md").read_text().partition("\n## Messages\n")[2]
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.M)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 20
    for message in messages:
        for part in message.split("..."):
            assert part.strip() in code, f"nothing says {part.strip()!r}"


def test_citation_names_this_version():
    """What CITATION.cff 1.2 requires is there, and it is about this version."""
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert said["cff-version"] == "1.2.0" and said["type"] == "software"
    assert {"message", "title", "authors"} <= set(said)
    assert said["version"] == __version__ and all("name" in author for author in said["authors"])


def test_every_option_of_serve_is_on_its_page():
    serve = COMMANDS.get_command(None, "serve")
    text = (ROOT / "docs" / "vllm.md").read_text()
    flags = [flag for option in serve.params for flag in option.opts if flag.startswith("--")]
    assert len(flags) > 8
    assert [
        flag for flag in flags if flag not in (*text.replace("`", " ").replace("/", " ").split(), "--help")
    ] == []
