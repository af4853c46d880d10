"""The table of requests: its columns, and what its requests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.core.errors import InputError
from headgate.core.request import ENVELOPE, FIELDS, MOST_WEIGHT, Slo, weight_remedy

Whole = npt.NDArray[np.int64]
Real = npt.NDArray[np.float64]

# Longest length of anything: far beyond any context window, and sums of millions of them still fit 64 bits.
LONGEST = 2**31 - 1
NO_GUESS = -1
OPEN_LOOP = 0


class Rule(NamedTuple):
    whole: bool
    least: int
    most: float
    remedy: str
    default: float | None = None


# Latest arrival: three centuries. Beyond, a float is too coarse for the steps of an engine.
LATEST = 1e10
FOUND = "cached tokens are whole numbers from 0 to one less than the prompt has"
TIME = Rule(False, 0, np.inf, "times are seconds of at least 0, fix or drop the row", np.inf)
LENGTHS = Rule(True, 1, LONGEST, f"lengths are whole numbers from 1 to {LONGEST}, fix or drop the row")
ARRIVAL = f"times are seconds of at least 0 and at most {LATEST:.0f}, fix or drop the row"
RULES = {  # the columns of a workload, in their order
    "arrival": Rule(False, 0, LATEST, ARRIVAL, 0),
    "prompt": LENGTHS,
    "output": LENGTHS,
    "kind": Rule(True, 0, LONGEST, "a kind is an index into kinds", 0),
    "limit": LENGTHS._replace(default=LONGEST),
    "priority": Rule(True, -LONGEST, LONGEST, "priorities are whole numbers, smaller is more urgent"),
    "patience": TIME,
    "abort": TIME,
    "guess": Rule(True, NO_GUESS, LONGEST, "a guess is a length, or -1 for none", NO_GUESS),
    "clients": Rule(True, OPEN_LOOP, LONGEST, f"clients are whole numbers up to {LONGEST}", OPEN_LOOP),
    "cached": Rule(True, 0, LONGEST, FOUND, 0),
    "tenant": Rule(True, 0, LONGEST, "a tenant is an index into tenants", 0),
}


def column(rule: Rule, values: npt.ArrayLike, called: str) -> Whole | Real:
    """A checked, read-only copy of one column in its own type; the error names it and the first wrong row."""
    try:
        given = np.array(values)
        numbers = given.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{called} holds something that is not a number; {rule.remedy}") from None
    if numbers.ndim != 1:
        raise InputError(f"{called} has {numbers.ndim} dimensions; give one value per request")
    wrong = ~((numbers >= rule.least) & (numbers <= rule.most))
    if rule.whole:
        wrong |= numbers != np.floor(numbers)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(f"{called} at row {row} is {given[row]}; {rule.remedy}")
    # Every whole column is bounded far below 2**53, so the way through float64 loses nothing.
    checked = numbers.astype(np.int64) if rule.whole else numbers
    checked.setflags(write=False)
    return checked


def check_together(columns: Mapping[str, Whole | Real], kinds: int, tenants: int) -> None:
    sizes = {name: len(values) for name, values in columns.items()}
    requests = sizes["prompt"]
    for name, size in sizes.items():
        if size != requests:
            raise InputError(f"{name} has {size} rows, prompt has {requests}; give one value per request")
    if requests == 0:
        raise InputError("a workload has no requests; give at least one")
    _check_arrivals(columns["arrival"], columns["clients"], columns["kind"])
    whole = columns["cached"] >= columns["prompt"]
    if whole.any():
        row = int(np.argmax(whole))
        raise InputError(f"cached at row {row} is {columns['cached'][row]}; {FOUND}")
    for name, known in (("kind", kinds), ("tenant", tenants)):
        beyond = columns[name] >= known
        if beyond.any():
            row = int(np.argmax(beyond))
            raise InputError(f"{name} at row {row} is {columns[name][row]}; there are only {known} {name}s")


def _check_arrivals(arrival: Whole | Real, clients: Whole | Real, kind: Whole | Real) -> None:
    """Sorted in an open loop; all zero in a closed one, where the clients decide when a request is sent."""
    back = np.diff(arrival) < 0
    if back.any():
        row = int(np.argmax(back)) + 1
        raise InputError(
            f"arrival at row {row} is {arrival[row]}, before the row above it; sort the requests by arrival"
        )
    closed = clients > OPEN_LOOP
    both = np.isin(kind, np.intersect1d(kind[closed], kind[~closed]))
    if both.any():
        first = int(np.argmax(both))
        row = int(np.argmax(both & (kind == kind[first]) & (closed != closed[first])))
        raise InputError(
            f"clients at row {row} is {clients[row]}, at row {first} {clients[first]}: open and closed loop "
            "in one class; give the clients a class of their own"
        )
    if arrival[closed].any():
        row = int(np.argmax(closed & (arrival > 0)))
        raise InputError(
            f"arrival at row {row} is {arrival[row]} in a closed loop; drop the arrivals or the clients"
        )


class Kind(NamedTuple):
    """A class of requests: its name, what its users were promised, and how urgent it is.

    Examples:
        >>> import headgate
        >>> kinds = (headgate.Kind("chat", headgate.Slo(first_token=0.5)), headgate.Kind("batch", priority=1))
        >>> requests = headgate.Workload.of([200, 900], [50, 300], kind=[0, 1], kinds=kinds)
        >>> requests.priority.tolist()
        [0, 1]
    """

    name: str = ""
    slo: Slo = Slo()
    priority: int = 0


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests with arrival times and lengths: one row each, in the order of arrival.

    Drawn or read in full before a run, so that every policy meets the same requests. The columns are checked
    when the table is made and cannot be written to afterwards.

    Attributes:
        arrival: seconds from the start, sorted; all zero in a closed loop.
        prompt: prompt tokens.
        output: true output tokens, which policies never see.
        kind: index into `kinds`.
        limit: most output tokens the request may have.
        priority: smaller is more urgent.
        patience: seconds in the queue after which it gives up.
        abort: seconds after arrival at which its client hangs up.
        guess: predicted output tokens, -1 without a prediction.
        clients: 0 in an open loop. In a closed one, request i is sent as soon as fewer than clients[i]
            requests are outstanding, so a schedule of concurrency stages is just this column. Beside
            requests of an open loop it counts those of its class and tenant, and is sent only while some of
            the open loop are still to come; what is left of the rows then is not sent.
        cached: prompt tokens that a prefix cache had of it, as recorded. Where `contents` is known the cache
            is simulated instead.
        tenant: index into `tenants`.
        kinds: the classes.
        tenants: names of those that share the engines; one without a name where that does not matter.
        name: what reports call it.
        origin: how it was made, for the run's record.
        contents: what requests share, for engines with a prefix cache; None: nothing is known of it.

    Examples:
        >>> import headgate
        >>> requests = headgate.Workload.of(prompt=[512, 256], output=[64, 128], arrival=[0.0, 1.5])
        >>> len(requests), requests.closed
        (2, False)
    """

    arrival: Real
    prompt: Whole
    output: Whole
    kind: Whole
    limit: Whole
    priority: Whole
    patience: Real
    abort: Real
    guess: Whole
    clients: Whole
    cached: Whole
    tenant: Whole
    kinds: tuple[Kind, ...] = (Kind(),)
    tenants: tuple[str, ...] = ("",)
    name: str = ""
    origin: Mapping[str, object] = field(default_factory=dict)
    contents: Contents | None = None

    def __post_init__(self) -> None:
        for what, names in (("kinds", [kind.name for kind in self.kinds]), ("tenants", self.tenants)):
            for name, times in Counter(names).items():
                if times > 1:
                    raise InputError(f"{times} {what} are called {name!r}; give each its own name")
        for kind in self.kinds:
            if (weight := kind.slo.weight) is not None and not 0 < weight <= MOST_WEIGHT:
                raise InputError(f"kind {kind.name!r} has weight {weight:g}; {weight_remedy(weight)}")
            if kind.slo.between_kind == ENVELOPE and kind.slo.first_token is None:
                raise InputError(
                    f"kind {kind.name!r} has an envelope, which begins at first_token; give that too"
                )
        for name, rule in RULES.items():
            object.__setattr__(self, name, column(rule, getattr(self, name), name))
        check_together(self.columns(), len(self.kinds), len(self.tenants))
        if self.contents is not None:
            self.contents.check(self.prompt)

    @classmethod
    def of(
        cls,
        prompt: npt.ArrayLike,
        output: npt.ArrayLike,
        *,
        kinds: Sequence[Kind] = (Kind(),),
        tenants: Sequence[str] = ("",),
        name: str = "",
        origin: Mapping[str, object] | None = None,
        contents: Contents | None = None,
        **columns: npt.ArrayLike,
    ) -> Workload:
        """A workload from the columns that matter; the others get their defaults (one kind, all at once).

        `columns` are any of arrival, kind, limit, priority (that of the kind by default), patience, abort,
        guess, clients, cached, tenant; one value stands for all rows.
        """
        requests = np.size(prompt)
        given = {key: rule.default for key, rule in RULES.items() if rule.default is not None} | columns
        for key in columns:
            if key not in RULES:
                raise InputError(f"a workload has no column {key!r}; choose from: {', '.join(RULES)}")
        filled = {k: np.full(requests, each) if np.ndim(each) == 0 else each for k, each in given.items()}
        if "priority" not in filled:  # that of the kind; an unknown kind is reported by the table's own check
            known = np.array([each.priority for each in kinds] or [0])
            kind = column(RULES["kind"], filled["kind"], "kind").astype(np.int64)
            filled["priority"] = known[np.minimum(kind, len(known) - 1)]
        filled.update(prompt=prompt, output=output)
        rest = {"kinds": tuple(kinds), "tenants": tuple(tenants), "name": name, "contents": contents}
        return cls(**filled, **rest, origin=dict(origin or {}))  # type: ignore[arg-type]

    def columns(self) -> dict[str, Whole | Real]:
        return {name: getattr(self, name) for name in RULES}

    def identities(self) -> Iterator[tuple[Any, ...]]:
        """What each request brings with it, in the order of `Identity` after `id` and `arrival`."""
        read: dict[str, Iterable[Any]] = {name: column.tolist() for name, column in self.columns().items()}
        read["kind"] = [self.kinds[kind].name for kind in read["kind"]]
        read["guess"] = [None if guess == NO_GUESS else guess for guess in read["guess"]]
        read["tenant"] = [self.tenants[tenant] for tenant in read["tenant"]]
        read["slo"] = [self.kinds[kind].slo for kind in self.kind.tolist()]
        return zip(*(read[name] for name in FIELDS[2:]), strict=True)

    def pieces(self) -> list[tuple[Piece, ...]] | None:
        """The content of every request, for engines with a prefix cache; None: they share nothing known."""
        return None if self.contents is None else self.contents.pieces()

    def __len__(self) -> int:
        return len(self.prompt)

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same requests; name and origin do not count."""
        if not isinstance(other, Workload):
            return NotImplemented
        theirs = other.columns()
        known = (self.kinds, self.tenants, self.contents) == (other.kinds, other.tenants, other.contents)
        return known and all(np.array_equal(mine, theirs[name]) for name, mine in self.columns().items())

    @property
    def closed(self) -> bool:
        """Whether clients, not a clock, decide when the next request is sent."""
        return bool(self.clients.all())

    @property
    def beside(self) -> bool:
        """Whether clients of some classes send beside requests that come at times of their own."""
        return bool(self.clients.any()) and not self.closed

    @property
    def remarks(self) -> list[str]:
        """How a trace was read, where it may be wrong: times, coarse ticks, columns left out, rows drawn."""
        told = ("times", "ticks", "unread", "resampled")
        return [str(self.origin[key]) for key in told if key in self.origin]

    def head(self, requests: int) -> Workload:
        """The first requests, or all of them when there are fewer."""
        if requests < 1:
            raise InputError(f"the first {requests} requests of a workload are none; ask for at least 1")
        if self.beside:
            raise InputError(
                "the first rows of a workload with clients beside an open loop are those of the clients, not "
                "what comes first; take the head of the open loop and merge the clients"
            )
        return self.subset(slice(0, requests))

    def subset(self, rows: slice | npt.NDArray[np.bool_]) -> Workload:
        """The requests in a slice or where a mask is true; their times stay as they are."""
        if not isinstance(rows, slice):
            rows = np.asarray(rows)
            if rows.dtype != np.bool_ or rows.shape != (len(self),):
                raise InputError(f"a mask needs one true or false for each of the {len(self)} requests")
        part: dict[str, Any] = {name: values[rows] for name, values in self.columns().items()}
        return replace(self, **part, contents=self.contents and self.contents.subset(rows))

    def between(self, start: float, end: float) -> Workload:
        """The requests that arrive from `start` to just before `end`, the clock set to zero at `start`."""
        self._open_only("slice of time")
        inside = (self.arrival >= start) & (self.arrival < end)
        if not inside.any():
            raise InputError(
                f"no request arrives from {start:g} s to {end:g} s; the workload spans "
                f"{self.arrival[0]:g} s to {self.arrival[-1]:g} s"
            )
        part = self.subset(inside)
        return part.arriving(part.arrival - start)

    def scale_rate(self, factor: float) -> Workload:
        """The same requests arriving `factor` times as fast."""
        self._open_only("rate")
        if not 0 < factor < np.inf:
            raise InputError(f"the rate cannot be scaled by {factor:g}; give a number above 0")
        return self.arriving(self.arrival / factor)

    def cap(self, prompt: int | None = None, output: int | None = None) -> Workload:
        """Lengths cut to at most these; a guess beyond the cut output is cut with it."""
        changed: dict[str, Any] = dict(self.columns())
        if prompt is not None and prompt >= 1 and self.contents is not None:
            changed["contents"] = self.contents.cut(prompt)
        for name, most in (("prompt", prompt), ("output", output), ("guess", output)):
            if most is not None and most < 1:
                raise InputError(f"{name} lengths cannot be capped at {most}; give at least 1")
            if most is not None:
                changed[name] = np.minimum(changed[name], min(most, LONGEST))
        changed["cached"] = np.minimum(changed["cached"], changed["prompt"] - 1)
        return replace(self, **changed)

    def merge(self, *others: Workload) -> Workload:
        """All requests of all workloads by arrival; ties keep the order given, so closed loops take turns."""
        parts = (self, *others)
        kinds = _numbered(kind for part in parts for kind in part.kinds)
        tenants = _numbered(name for part in parts for name in part.tenants)
        joined = {name: np.concatenate([part.columns()[name] for part in parts]) for name in RULES}
        own = [np.array([kinds[kind] for kind in part.kinds])[part.kind] for part in parts]
        owners = [np.array([tenants[name] for name in part.tenants])[part.tenant] for part in parts]
        joined |= {"kind": np.concatenate(own), "tenant": np.concatenate(owners)}
        order = np.argsort(joined["arrival"], kind="stable")
        contents = None
        if any(part.contents is not None for part in parts):
            first, *rest = (part.contents or private(part.prompt) for part in parts)
            contents = first.behind(rest).subset(order)
        return Workload(
            **{name: values[order] for name, values in joined.items()},
            kinds=tuple(kinds),
            tenants=tuple(tenants),
            name="+".join(dict.fromkeys(part.name for part in parts if part.name)),
            origin={"merged": [dict(part.origin) for part in parts]},
            contents=contents,
        )

    def arriving(self, times: npt.ArrayLike) -> Workload:
        """The same requests in an open loop, arriving at these times."""
        return replace(self, **dict[str, Any](arrival=times, clients=np.zeros(len(self))))

    def all_at_once(self) -> Workload:
        """The same requests, all present at the start."""
        return self.arriving(np.zeros(len(self)))

    def as_closed(self, clients: int) -> Workload:
        """The same requests in a closed loop of so many clients."""
        if clients < 1:
            raise InputError(f"a closed loop of {clients} clients; give at least 1")
        columns: dict[str, Any] = {"arrival": np.zeros(len(self)), "clients": np.full(len(self), clients)}
        return replace(self, **columns)

    def _open_only(self, what: str) -> None:
        if self.clients.any():
            raise InputError(f"a closed loop has no arrival times, so no {what}; choose its clients instead")


def _numbered(names: Iterable[Hashable]) -> dict[Any, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


# -- what requests share, as pieces that a prefix cache finds

PRIVATE = -1  # key of content that no other request has
Piece = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Contents:
    """A ragged table: row i has the pieces offsets[i] to offsets[i + 1], each with a key and its tokens.

    Equal keys behind equal pieces mean equal tokens. The last piece goes on as the request's output. If no
    other request can have that output, it is a PRIVATE piece, of no tokens if the prompt ends before it.
    """

    offsets: Whole
    keys: Whole
    tokens: Whole

    @classmethod
    def of(cls, rows: Iterable[Sequence[Piece]]) -> Contents:
        offsets, keys, tokens = [0], [], []
        for row in rows:
            for key, count in row:
                keys.append(key)
                tokens.append(count)
            offsets.append(len(keys))
        return cls(*(np.array(column, dtype=np.int64) for column in (offsets, keys, tokens)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self) -> list[list[Piece]]:
        pairs = list(zip(self.keys.tolist(), self.tokens.tolist(), strict=True))
        return [pairs[start:end] for start, end in pairwise(self.offsets.tolist())]

    def pieces(self) -> list[tuple[Piece, ...]]:
        """The same with a key of its own for each private piece, for an engine."""
        rows = enumerate(self.rows())
        return [
            tuple((key if key >= 0 else -1 - number, count) for key, count in row) for number, row in rows
        ]

    def check(self, prompt: Whole) -> None:
        """Every request has all tokens of its prompt in pieces; pieces beyond it are its output."""
        if len(self) != len(prompt):
            raise InputError(f"contents has {len(self)} rows, prompt has {len(prompt)}; give one per request")
        empty = np.diff(self.offsets) < 1
        if empty.any():
            raise InputError(f"contents of row {int(np.argmax(empty))} has no piece; give at least one")
        if (self.keys < PRIVATE).any() or (self.tokens < 0).any():
            raise InputError("contents has a key below -1 or a piece of fewer than 0 tokens; fix the pieces")
        sums = np.add.reduceat(self.tokens, self.offsets[:-1])
        wrong = sums < prompt
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(f"contents of row {row} has {sums[row]} tokens, its prompt {prompt[row]}")

    def subset(self, rows: slice | npt.NDArray[Any]) -> Contents:
        every = self.rows()
        return Contents.of(every[row] for row in np.arange(len(self))[rows].tolist())

    def cut(self, most: int) -> Contents:
        """Of each request the first `most` tokens; the output of one that was cut is its own."""

        def cut(row: Sequence[Piece]) -> list[Piece]:
            kept, left = list[Piece](), most
            for key, tokens in row:
                if tokens > left:
                    return [*kept, *([(key, left)] if left else []), (PRIVATE, 0)]
                kept.append((key, tokens))
                left -= tokens
            return kept

        return Contents.of(cut(row) for row in self.rows())

    def behind(self, others: Sequence[Contents]) -> Contents:
        """All of them one after the other; keys of one table mean nothing in another."""
        rows, shift = [], 0
        for table in (self, *others):
            rows += [[(key if key < 0 else key + shift, n) for key, n in row] for row in table.rows()]
            shift += int(table.keys.max(initial=-1)) + 1
        return Contents.of(rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contents) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("offsets", "keys", "tokens")
        )


def private(prompts: Whole) -> Contents:
    return Contents.of([(PRIVATE, tokens)] for tokens in prompts.tolist())


def of_hashes(ids: Sequence[Sequence[object]], spans: Sequence[int], block: int) -> Contents:
    """From the hash ids of published traces: one for each `block` tokens of a span, the last one shorter.

    What comes after the span is private. Ids that always occur together become one piece.
    """
    rows = []
    for chain, span in zip(_joined(ids), spans, strict=True):
        row, left = [], span
        for key, blocks in chain:
            if left:
                row.append((key, min(left, blocks * block)))
                left -= row[-1][1]
        rows.append([*row, (PRIVATE, left)])
    return Contents.of(rows)


def _joined(ids: Sequence[Sequence[object]]) -> list[list[Piece]]:
    end, several = object(), object()
    follows: dict[object, object] = {}
    behind: dict[object, object] = {}
    for row in ids:
        before: object = end
        for id in row:
            behind[id] = before if behind.get(id, before) == before else several
            if before is not end:
                follows[before] = id if follows.get(before, id) == id else several
            before = id
        if before is not end:
            follows[before] = several
    numbers: dict[object, int] = {}
    chains = []
    for row in ids:
        chain: list[Piece] = []
        before = end
        for id in row:
            if before is not end and follows[before] == id and behind[id] == before:
                key, count = chain[-1]
                chain[-1] = key, count + 1
            else:
                chain.append((numbers.setdefault(id, len(numbers)), 1))
            before = id
        chains.append(chain)
    return chains
