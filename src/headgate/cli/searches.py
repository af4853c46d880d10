"""What commands that search have in common: the promise, the policies, and where answers go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from headgate.advisor.settings import SEARCH, SearchSettings
from headgate.core.errors import InputError
from headgate.experiment.settings import NAMED, POLICY, Experiment

if TYPE_CHECKING:
    from headgate.advisor.capacity.slo import Level


def flag(help: str, panel: str = SEARCH) -> typer.models.OptionInfo:
    """An option of a search."""
    option: typer.models.OptionInfo = typer.Option(help=help, rich_help_panel=panel)
    return option


Levels = Annotated[list[str] | None, flag("service levels, such as ttft=500ms@p50,tbt=100ms@p99:paying")]
Policies = Annotated[list[str] | None, flag(f"{NAMED} or all; may be repeated", POLICY)]
Cache = Annotated[str | None, flag("folder of answers from before; none: use none")]


class Asked(NamedTuple):
    """A question, checked before any work."""

    levels: tuple[Level, ...]
    policies: list[str]
    options: SearchSettings
    cache: str | None = None

    @property
    def folder(self) -> Path | None:
        """Of answers from before."""
        from headgate.advisor.capacity.memory import chosen_folder

        return chosen_folder(self.cache)


def asked(
    command: str,
    words: Experiment,
    search: SearchSettings,
    slo: list[str] | None,
    policies: Sequence[str] | None = None,
    cache: str | None = None,
) -> Asked:
    """There is a promise, and jobs are as many as cores unless told."""
    from headgate.advisor.capacity.slo import parse_levels

    if not slo:
        raise InputError(f"{command} needs a promise, such as --slo ttft=1s@p95,tbt=100ms@p99")
    options = search.model_copy(update={"jobs": search.jobs or os.cpu_count() or 1})
    return Asked(parse_levels(slo), list(policies or words.policies), options, cache)
