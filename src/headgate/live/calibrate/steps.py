"""Steps of an engine as a table to fit a card to: from a trace, SGLang's messages, or what clients saw."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.core.files import read_json, read_text
from headgate.cost.fit.steps import StepTable
from headgate.record.live_trace import tell_trace
from headgate.record.tables import Floats, Integers

LABEL_EVERY = 200  # steps that make a part: neighbours are alike, so a fit is tried on whole stretches


def steps_of_trace(path: str | Path) -> tuple[StepTable, dict[str, Any]]:
    told = _TraceSteps()
    header = tell_trace(path, told.tell)
    told.settle()
    if not told.rows:
        raise InputError(f"trace {path}: no step in it; let the engine serve some requests first")
    return _table(told.rows, "steps"), header


def _table(rows: Sequence[Mapping[str, float]], what: str, **more: list[bool]) -> StepTable:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parts = [row // LABEL_EVERY for row in range(len(rows))]
    labels = [f"{what} from {LABEL_EVERY * part}" for part in range(parts[-1] + 1)]
    return StepTable.from_columns({**columns, "part": parts, **more}, labels)


class _TraceSteps:
    """A request told as prefilled got all its missing tokens, the rest of a step's prompts went to others in
    order of admission. Where that does not add up (prefix caching), the pairs are unknown.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._todo: dict[int, int] = {}  # of those admitted, by order
        self._prompt: dict[int, int] = {}
        self._here: set[int] = set()
        self._end: float | None = None  # of the newest step, if requests stayed
        self._paused: float | None = None  # when a plan let all stand; no step was composed since
        self._open: dict[str, Any] | None = None  # a step whose completed prompts are still to be told
        self._done: list[int] = []

    def tell(self, line: dict[str, Any]) -> None:
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
            began = self._end if self._end is not None else start
            row = {"seconds": end - began, "decodes": line["decodes"], "context": context}
            row |= {"prefill": line["prefill"], "behind": line["behind"], "prompts": len(pieces)}
            row |= {"busy": start <= began and self._end is not None, "attention": pairs if known else nan}
            self.rows.append(row | {"queries": line["queries"] or line["decodes"]})
            context += line["decodes"]
            start = end
            self._end = end if self._here else None
        for id in done:
            self._todo.pop(id, None)

    def _pieces(self, tokens: int, done: list[int]) -> list[tuple[int, int]]:
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


# -- from SGLang's --enable-forward-pass-metrics

PASS_LIMITS = (
    "times are those of the GPU: what SGLang's host takes between two passes is not in them",
    "a message does not say how several prompts share a pass: their attention is an estimate",
)
PASS_REMEDY = "record one with python -m headgate.live.sglang.record_passes"
LONGEST_LINE = 65_536  # bytes; a message has some 600
# Fields of `scheduled_requests`: prompts, their tokens, KV behind them, spread of lengths, decodes, their KV.
PASS_FIELDS = (
    "num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens", "var_prefill_length",
    "num_decode_requests", "sum_decode_kv_tokens",
)  # fmt: skip


def steps_of_passes(path: str | Path) -> StepTable:
    """SGLang times each pass on the GPU: none is summed with its neighbours. Idle heartbeats are left out."""
    rows: list[dict[str, float]] = []
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), 1):
                if line.strip():
                    rows.append(_pass(line, f"passes {path}:{number}"))
    except OSError as error:
        raise InputError(f"passes {path}: {error.strerror}; {PASS_REMEDY}") from None
    rows = [row for row in rows if row["seconds"] > 0]
    if not rows:
        raise InputError(f"passes {path}: no timed pass in it; let the server serve some requests first")
    busy = [False] * len(rows)  # nothing is told of the host
    return replace(_table(rows, "passes", busy=busy), exact=True)


def _pass(line: bytes, place: str) -> dict[str, float]:
    try:
        message = json.loads(line)
        version, seconds = message["version"], message["wall_time"]
        figures = [message["scheduled_requests"][name] for name in PASS_FIELDS]
    except (ValueError, RecursionError, TypeError, KeyError, IndexError):
        raise InputError(f"{place}: not a message of SGLang's forward passes; {PASS_REMEDY}") from None
    if version != 1:
        raise InputError(f"{place}: messages of version {version!r}; headgate reads version 1")
    if not all(type(n) in NUMBERS and 0 <= n <= MOST for n in (seconds, *figures)):
        raise InputError(f"{place}: a time or a count is not a number of zero or more; {PASS_REMEDY}")
    prompts, tokens, behind, spread, decodes, context = figures
    each = max(1, prompts)
    # Exact for one prompt. The spread is that of whole prompts, so it counts where nothing lies behind them.
    pairs = tokens * (behind + tokens / 2) / each + (0.0 if behind else prompts * spread / 2)
    row = {"seconds": seconds, "decodes": decodes, "context": context, "prefill": tokens, "behind": behind}
    return row | {"prompts": prompts, "attention": pairs}


# -- from `vllm bench serve --save-detailed`

LARGEST_FILE = 1 << 32  # bytes
NEEDED = ("input_lens", "ttfts", "itls", "start_times")
SAME_STEP = 0.25  # of the median gap between tokens: tokens nearer than that came from one step
GUESSES_EVERY = 100  # steps that make a part
NUMBERS = {int, float}  # of a JSON file
MOST = 1e15  # of a count or a time
LIMITS = (
    "steps are told apart by when tokens came: those that bring none (pieces of prompts, nobody decodes) "
    "count with the next",
    "a prompt is put into the step of its first token, what exceeds the budget into the steps before",
    "network, detokenisation and front end are part of every time; host cannot be told from GPU",
    "prefix caching, preemption and speculation cannot be told: use runs without them",
)


def steps_of_bench(path: str | Path, budget: int) -> tuple[StepTable, dict[str, Any]]:
    """What a result file lets one guess; `LIMITS` says what cannot be known. A step is a bunch of tokens that
    came together, its time the distance to the bunch before; after a pause without requests it is left out.
    """
    result = _read(path)
    time, of, place = _tokens(result)
    prompts = np.array(result["input_lens"], dtype=np.int64)
    step = _bunches(time, place)
    count = int(step[-1]) + 1
    end = np.zeros(count)
    np.maximum.at(end, step, time)
    later = place > 0
    decodes = np.bincount(step[later], minlength=count)
    context = np.bincount(step[later], (prompts[of] + place)[later], minlength=count)
    prefill, number, pairs = _prompts(step[~later], prompts[of[~later]], decodes, budget)
    good = _served(result, end) & (decodes + prefill > 0)
    parts = np.arange(int(good.sum())) // GUESSES_EVERY
    measured = {"seconds": np.diff(end, prepend=np.nan), "decodes": decodes, "context": context}
    measured |= {"prefill": prefill, "prompts": number, "attention": pairs}
    columns = {**{name: column[good] for name, column in measured.items()}, "part": parts}
    labels = [f"steps from {GUESSES_EVERY * part}" for part in range(int(parts.max(initial=0)) + 1)]
    words = {name: value for name, value in result.items() if not isinstance(value, list)}
    return StepTable.from_columns(columns, labels), words


def _read(path: str | Path) -> dict[str, Any]:
    remedy = "give a file of `vllm bench serve --save-result --save-detailed`"
    what = f"bench result {path}"
    result = read_json(read_text(str(path), "bench result", remedy, LARGEST_FILE), what, remedy)
    missing = [name for name in NEEDED if not result.get(name)]
    if missing:
        raise InputError(f"{what} has no {missing[0]}, so steps cannot be told; {remedy}")
    lengths = {len(result[name]) if isinstance(result[name], list) else -1 for name in NEEDED}
    if len(lengths) > 1 or -1 in lengths:
        raise InputError(f"{what}: {', '.join(NEEDED)} are no lists of one length; {remedy}")
    for number, row in enumerate(zip(*(result[name] for name in NEEDED), strict=True)):
        prompt, first, gaps, start = row
        sound = type(prompt) in NUMBERS and 0 <= prompt < inf
        if sound and first:
            sound = isinstance(gaps, list) and {type(first), type(start), *map(type, gaps)} <= NUMBERS
        if not sound:
            raise InputError(f"{what}: request {number} has times or lengths of nonsense; {remedy}")
    return result


def _tokens(result: dict[str, Any]) -> tuple[Floats, Integers, Integers]:
    times, owners, places = [], [], []
    told = zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
    for number, (start, first, gaps) in enumerate(told):
        if not first:  # it failed
            continue
        came = start + first + np.cumsum([0.0, *gaps])
        times.append(came)
        owners.append(np.full(len(came), number))
        places.append(np.arange(len(came)))
    if not times:
        raise InputError("no request of the bench result got a token; nothing can be fitted to it")
    time, of, place = map(np.concatenate, (times, owners, places))
    order = np.argsort(time, kind="stable")
    return time[order], of[order], place[order]


def _bunches(time: Floats, place: Integers) -> Integers:
    gaps = np.diff(time)
    if not len(gaps) or not np.any(place):
        raise InputError("every request of the bench result has one token; decodes cannot be told")
    spread = np.diff(np.unique(np.round(time, 4)))
    limit = SAME_STEP * float(np.median(spread[spread > 0.001])) if np.any(spread > 0.001) else 0.0
    return np.concatenate(([0], np.cumsum(gaps > limit)))


def _prompts(
    step: Integers, prompts: Integers, decodes: Integers, budget: int
) -> tuple[Integers, Integers, Floats]:
    """Prompt tokens, prompts and pairs of each step; what a step has no room for goes to the one before."""
    tokens = np.zeros(len(decodes), np.int64)
    number = np.zeros(len(decodes), np.int64)
    pairs = np.zeros(len(decodes))
    for at, length in zip(step.tolist(), prompts.tolist(), strict=True):
        left = int(length)
        while left > 0 and at >= 0:
            room = max(0, budget - int(decodes[at] + tokens[at]))
            taken = min(left, room) if at else left
            if taken:
                left -= taken
                tokens[at] += taken
                number[at] += 1
                pairs[at] += taken * (left + taken / 2)
            at -= 1
    return tokens, number, pairs


def _served(result: dict[str, Any], end: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
    starts = np.array(result["start_times"], dtype=np.float64)
    first = np.array([each or 0.0 for each in result["ttfts"]])
    ends = starts + first + np.array([sum(gaps) for gaps in result["itls"]])
    before = np.concatenate(([-np.inf], end[:-1]))
    come = np.searchsorted(np.sort(starts), before, side="right")
    gone = np.searchsorted(np.sort(ends), before + 1e-9, side="right")
    return np.asarray((come > gone) & np.isfinite(before))
