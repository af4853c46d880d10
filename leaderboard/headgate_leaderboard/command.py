"""`headgate leaderboard`: every policy on every trace, judged by every promise."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.output import Report, bar, report_option, said_to, save_page
from headgate.core.errors import InputError

BOARD = "leaderboard/policies.toml"


def leaderboard(
    policy: Annotated[list[str] | None, typer.Option(help="a name of the board; may be repeated")] = None,
    trace: Annotated[list[str] | None, typer.Option(help="likewise, of its traces")] = None,
    board: Annotated[str, typer.Option(help="the file that names policies, traces and promises")] = BOARD,
    out: Annotated[str | None, typer.Option(help="folder for results/ (default: the board's)")] = None,
    requests: Annotated[int | None, typer.Option(min=100, help="of a run, instead of the board's")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=100, help="likewise")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes (default: one per core)")] = None,
    known: Annotated[bool, typer.Option(help="run nothing, show the lines that are there")] = False,
    page: Annotated[str | None, report_option("also write the tables of all policies as Markdown")] = None,
    report: Report = None,
) -> None:
    """Compare policies by several promises, with the bound.

    Reads a board, leaderboard/policies.toml in a clone of the project. Runs what is not known yet, writes a
    line for every run under results/ beside the board (or --out), and shows the policies that were asked for.
    A run that is known is not made again until the policy, the board or headgate changes. A policy of your
    own: one file, and one line in the board.

    Examples:
      headgate leaderboard --policy mine --requests 500 --seeds 1 --out try
      headgate leaderboard --policy keep --policy ppas --trace azure-conv
      headgate leaderboard --page docs/leaderboard.md --report board.html
      headgate leaderboard --known --page docs/leaderboard.md
    """
    from headgate.experiment.workers import Workers
    from headgate.report.terminal import show
    from headgate_leaderboard.board import chosen, read_board, run_board, standings
    from headgate_leaderboard.page import RESULTS, into_markdown, leaderboard_page

    before = Path(page).read_text(encoding="utf-8") if page and Path(page).exists() else ""
    if before and RESULTS not in before:
        raise InputError(f"--page {page} has no line {RESULTS}; add it where the tables are to stand")
    words = read_board(Path(board), Path(out) if out else None, requests, seeds)
    policies = chosen(policy or [], words.settings.policies, "policy", words.file)
    traces = chosen(trace or [], words.settings.traces, "trace", words.file)
    if not known:
        beside = dict.fromkeys((*policies, words.settings.baseline))
        run_board(words, list(beside), traces, Workers(jobs or os.cpu_count() or 1), bar)
    lines = standings(words, words.settings.policies)
    if not any(name in policies for name, _ in lines):
        raise InputError(f"{words.results} has no lines of {', '.join(policies)}; drop --known to make them")
    say = said_to(None)
    show(leaderboard_page(words, lines, policies, sys.argv[1:]), say)
    if page or report:
        whole = leaderboard_page(words, lines, list(words.settings.policies), sys.argv[1:])
        save_page(whole, report, say)
        if page:
            Path(page).write_text(into_markdown(whole, before), encoding="utf-8")
            print(f"page: {page}", file=say)
