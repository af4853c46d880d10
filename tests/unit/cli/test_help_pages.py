"""Pages of `--help` fit 80 columns, say all of every description, and keep examples that a shell can read."""

import re

import pytest
import typer
from typer.testing import CliRunner

from headgate.cli import app
from headgate.cli.help import examples


def commands(group, path=()):
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        yield (*path, name), command
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))


ALL = [((), typer.main.get_command(app)), *commands(typer.main.get_command(app))]


def joined(text):
    return re.sub(r"\s+", " ", text.replace("\\\n", " "))


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) or "headgate" for path, _ in ALL])
def test_a_page_fits_80_columns_and_loses_nothing(path, command):
    page = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, page.splitlines())) <= 80
    assert joined(command.help) in joined(page)
    for option in command.params:
        assert option.hidden or joined(option.help) in joined(page)
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        assert command.get_command(None, name).help.split("\n\n")[0] in page  # on one line, to its end


def test_long_examples_are_broken_before_options():
    said = examples("Examples:\n  headgate demo --out abc --report none\n      --more 1", 30)
    assert said == "Examples:\n  headgate demo --out abc \\\n      --report none --more 1"


def test_a_switch_that_can_be_off_takes_one_place():
    page = CliRunner().invoke(app, ["doctor", "--help"]).output
    assert "--[no-]seams " in page and "--no-seams" not in page


def test_what_a_command_has_of_its_own_comes_first():
    page = CliRunner().invoke(app, ["plan", "capacity", "--help"]).output
    heads = re.findall(r"^(\w+):$", page, re.MULTILINE)
    assert heads == ["Arguments", "Options", "Search", "Policy", "Engine", "Lengths", "Load", "Trace"]
