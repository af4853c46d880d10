"""The steps of a live engine's trace as a table to fit a cost card to."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError
from headgate.cost.fit.steps import StepTable
from headgate.record.live_trace import WRONG, trace_lines

LABEL_EVERY = 200  # steps that make a part: neighbours are alike, so a fit is tried on whole stretches


class _Steps:
    """Turns the events of a trace into rows.

    A trace tells of all prompts of a step together. Which of them ran is known: whoever is told as prefilled
    right after it got all its missing tokens, what is left went to the others in the order of
    admission. Where that does not add up (prefix caching), the number of prompts stays and their pairs are
    unknown.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._todo: dict[int, int] = {}  # of those admitted, by order
        self._prompt: dict[int, int] = {}
        self._here: set[int] = set()
        self._end: float | None = None  # of the newest step, if somebody stayed
        self._paused: float | None = None  # when a plan let everybody stand; no step was composed since
        self._open: dict[str, Any] | None = None  # a step whose completed prompts are still to be told
        self._done: list[int] = []

    def tell(self, line: dict[str, Any]) -> None:
        """One line of the trace."""
        event = line["event"]
        if event == "steps":
            self.settle()
            self._open = line
        elif event == "prefilled":
            self._done.append(line["id"])
        elif event == "plan" and not line["decode"] and not line["prompts"]:
            self._paused = line["at"]
        elif event in ("arrived", "admitted", "evicted", "finished"):
            self.settle()
            getattr(self, f"_{event}")(line)

    def settle(self) -> None:
        """The newest step is complete: a row for each of its repetitions."""
        line, done = self._open, self._done
        self._open, self._done = None, []
        if line is None:
            return
        pieces = self._pieces(line["prefill"], done)
        known = sum(tokens for tokens, _ in pieces) == line["prefill"]
        pairs = sum(tokens * (start + tokens / 2) for tokens, start in pieces)
        start, context = line["start"], line["context"]
        if self._paused is not None and start > self._paused:
            self._end = self._paused = None
        for end in line["ends"]:
            follows = self._end is not None
            began = self._end if self._end is not None else start
            row = {"seconds": end - began, "decodes": line["decodes"], "context": context}
            row |= {"prefill": line["prefill"], "behind": line["behind"], "busy": start <= began and follows}
            row |= {"prompts": len(pieces), "attention": pairs if known else nan}
            self.rows.append(row)
            context += line["decodes"]
            start = end
            self._end = end if self._here else None
        for id in done:
            self._todo.pop(id, None)

    def _pieces(self, tokens: int, done: list[int]) -> list[tuple[int, int]]:
        """Tokens, and what lies behind them, of each prompt in a step."""
        found: list[tuple[int, int]] = []
        for id in [*done, *(id for id in self._todo if id not in done)]:
            todo = self._todo.get(id, 0)
            taken = min(todo, tokens)
            if taken > 0:
                found.append((taken, max(0, self._prompt.get(id, todo) - todo)))
                self._todo[id] = todo - taken
                tokens -= taken
        return found

    def _arrived(self, line: dict[str, Any]) -> None:
        self._here.add(line["id"])
        self._prompt[line["id"]] = line["prompt"]

    def _admitted(self, line: dict[str, Any]) -> None:
        self._todo[line["id"]] = self._prompt.get(line["id"], 0)

    def _evicted(self, line: dict[str, Any]) -> None:
        self._todo.pop(line["id"], None)
        self._prompt[line["id"]] = self._prompt.get(line["id"], 0) + line["output"]

    def _finished(self, line: dict[str, Any]) -> None:
        self._here.discard(line["id"])
        self._todo.pop(line["id"], None)
        self._prompt.pop(line["id"], None)
        if not self._here:
            self._end = None


def steps_of_trace(path: str | Path) -> tuple[StepTable, dict[str, Any]]:
    """The timed steps of a trace that `headgate serve --trace` wrote, and what its first line says."""
    lines = trace_lines(path)
    _, header = next(lines)
    told = _Steps()
    for number, line in lines:
        try:
            told.tell(line)
        except WRONG as error:
            raise InputError(
                f"trace {path}:{number}: {line.get('event')!r} makes no sense here "
                f"({type(error).__name__}: {error}); the file was changed, take another"
            ) from None
    told.settle()
    if not told.rows:
        raise InputError(f"trace {path}: no step in it; let the engine serve some requests first")
    columns = {name: [row[name] for row in told.rows] for name in told.rows[0]}
    parts = [row // LABEL_EVERY for row in range(len(told.rows))]
    labels = [f"steps from {LABEL_EVERY * part}" for part in range(parts[-1] + 1)]
    return StepTable.from_columns({**columns, "part": parts}, labels), header
