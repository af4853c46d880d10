"""docs/commands.md names every command and every flag: above its messages it is what --help shows.

`pytest --update-golden tests/unit/cli/test_commands_page.py` writes it.
"""

from collections import Counter
from pathlib import Path

import typer

from headgate.advisor.settings import SEARCH
from headgate.cli import app

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"
SHARED = 3  # commands that take a flag with the same meaning, for that meaning to stand on the page
TOP = """# Commands, flags and messages

`headgate COMMAND --help` explains every flag of a command. The lists are made from it: flags that several
commands share, with their meaning, then every command with the names of its own flags (most switches have a
`--no-...`, too); at the end [messages](#messages) and what to do. A duration needs its unit (`500ms`, `2s`).
Experiment files use the same names, with `_` for `-`.
"""
MESSAGES = "## Messages\n"  # what stands below is written by hand


def leaves(group, name="headgate"):
    for word in group.list_commands(None):
        command = group.get_command(None, word)
        if hasattr(command, "list_commands"):
            yield from leaves(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def plain(text):
    return " ".join((text or "").replace("\b", "").split()).replace("<", "&lt;")


def flags(command):
    """Its flags as (panel, flag, meaning)."""
    for each in command.params:
        if each.opts[0].startswith("--") and each.opts[0] != "--help" and not each.hidden:
            names = " / ".join(f"`{name}`" for name in (*each.opts, *each.secondary_opts))
            yield getattr(each, "rich_help_panel", None) or "", names, plain(each.help)


def page():
    commands = dict(leaves(typer.main.get_command(app)))
    taken = Counter(entry for command in commands.values() for entry in set(flags(command)))
    shared = [entry for entry in taken if taken[entry] >= (2 if entry[0] == SEARCH else SHARED)]
    lines = [TOP, "## Flags of several commands", ""]
    first = [entry for entry in flags(commands["headgate compare"]) if entry in shared]
    order = [*first, *sorted(set(shared) - set(first))]
    for panel in dict.fromkeys(panel for panel, _, _ in order):
        lines += [f"**{panel or 'Output'}**", ""]
        lines += [*(f"- {flag}: {meaning}" for where, flag, meaning in order if where == panel), ""]
    lines += ["## Commands", ""]
    for name, command in commands.items():
        own = [entry[1].split(" / ")[0] for entry in flags(command) if entry not in shared]
        said = plain((command.help or "").split("\n\n")[0])
        lines.append(f"- **`{name}`**: {said}{' Its own: ' + ', '.join(own) + '.' if own else ''}")
    return "\n".join([*lines, "", ""])


def test_the_page_is_what_help_says(request):
    found = page()
    made, heading, messages = PAGE.read_text(encoding="utf-8").partition(MESSAGES)
    assert heading
    if request.config.getoption("--update-golden"):
        PAGE.write_text(found + heading + messages, encoding="utf-8")
        made = found
    assert made == found, "run pytest --update-golden on this file"
