"""Pages of `--help` for 80 columns: options in two columns under the headings of their settings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from headgate.core.errors import elsewhere

VERBATIM = "Examples:\n"  # begins a paragraph that is not filled
EXAMPLE = re.compile(r"  headgate .*")
CONTINUED = re.compile(r"\n {4,}")
LONGEST = 24  # letters of a label; the text of longer ones begins further right
WIDEST = 100  # columns, also on wider terminals
VALUES = re.compile("int|float", re.IGNORECASE)  # names of numbers in any release of typer


Command = TypeVar("Command", bound=Callable[..., Any])
Text = str | None  # options that may be left out
Texts = list[str] | None
Number = int | None


def panelled(help: str, panel: str, flag: str = "", **more: Any) -> Any:
    return typer.Option(*filter(None, [flag]), help=help, rich_help_panel=panel, **more)


class Application(typer.Typer):
    def __init__(self, group: type[TyperGroup] | None = None, **settings: Any) -> None:
        width = {"max_content_width": WIDEST}
        plain: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "context_settings": width}
        super().__init__(cls=group or GroupPage, no_args_is_help=True, **plain, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Command], Command]:
        return super().command(name, cls=CommandPage, **settings)


def built(command: Application | Callable[..., Any]) -> Any:
    if not isinstance(command, Application):
        alone = Application()
        alone.command(context_settings=getattr(command, "context", None))(command)
        command = alone
    return typer.main.get_command(command)


# Packages of their own bring these by an entry point; where they are in a clone.
PLUGGED_IN = {
    "reproduce": "papers",
    "plan wait": "papers",
    "leaderboard": "leaderboard",
    "check": "leaderboard",
}


def offered(name: str) -> Any:
    from importlib import metadata  # slow to import

    return metadata.entry_points(group="headgate.commands", name=name)


def plugged_in(name: str) -> Any:
    for point in offered(name):
        return built(point.load())
    raise elsewhere(f"headgate {name}", PLUGGED_IN[name])


class CommandPage(TyperCommand):
    """Text is filled, also where its source has line breaks."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            formatter.write_paragraph()
            if paragraph.startswith(VERBATIM):
                shown = examples(paragraph, formatter.width - 2)
                formatter.write(textwrap.indent(shown, "  ") + "\n")
            else:
                formatter.write(_filled(paragraph, formatter.width, "  ", "  "))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class GroupPage(TyperGroup):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def examples(text: str, width: int) -> str:
    """Long ones are broken before an option, so that a shell reads them as they are."""

    def folded(found: re.Match[str]) -> str:
        first, *options = re.split(r" (?=--)", found[0])
        lines = [first]
        for option in options:
            if len(lines[-1]) + len(f" {option} \\") > width:
                lines.append(" " * 6 + option)
            else:
                lines[-1] += f" {option}"
        return " \\\n".join(lines)

    return EXAMPLE.sub(folded, CONTINUED.sub(" ", text))


def _filled(text: str, width: int, first: str, others: str) -> str:
    how: dict[str, Any] = {"initial_indent": first, "subsequent_indent": others}
    how |= {"break_on_hyphens": False, "break_long_words": False}
    return textwrap.fill(" ".join(text.split()), width, **how) + "\n"


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """What a command has of its own comes before the settings of runs."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for each in command.get_params(ctx):
        record = each.get_help_record(ctx)
        if record is not None:  # None: hidden
            panel = "Arguments" if each.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(each, "rich_help_panel", None) or panel, []).append(_row(each, *record))
    labels = [label for rows in panels.values() for label, _ in rows]
    indent = 4 + max(len(label) for label in labels if len(label) <= LONGEST)
    order = ["Arguments", "Options", *panels]
    if not {*panels} <= {"Arguments", "Options"}:
        from headgate.cli.flags import PANELS  # slow to import, and the first page of all needs none of them

        order = [*(panel for panel in order if panel not in PANELS), *PANELS]
    for panel in dict.fromkeys(order):
        if panels.get(panel):
            with formatter.section(panel):
                for label, text in panels[panel]:
                    first = f"  {label}  ".ljust(indent)
                    formatter.write(_filled(text, formatter.width, first, " " * indent))


def _row(parameter: Any, label: str, text: str) -> tuple[str, str]:
    """`--[no-]name` for a switch that can be off; else the name, and whether a number or text follows."""
    name = ", ".join(parameter.opts)
    if parameter.param_type_name == "argument":
        return label.split(" ")[0], text
    if parameter.secondary_opts:
        return f"--[no-]{name[2:]}", parameter.help + (" (default: yes)" if parameter.default else "")
    value = label.removeprefix(name).strip()
    kind = parameter.metavar or ("N" if VALUES.search(value) else "TEXT")
    return f"{name} {kind}" if value else name, text
