"""Draws what an engine does under each policy: the same dozen requests, simulated, one SVG for each page.

    python -m tools.policy_pictures        # writes docs/policies/*.svg

A lane is a request. Every picture has the same requests, engine and time axis, so that two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import ceil, inf
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import headgate
from headgate.core.ledger import Entry
from headgate.sim.engine.replica import VirtualEngine
from headgate.sim.engine.simulator import Simulator

PAGES = Path(__file__).resolve().parent.parent / "docs" / "policies"
CARD, SLOTS, BUDGET, KV = "pub-rtx-ada-6000-mistral-7b", 5, 512, 3040
FIRST_TOKEN, GAP = 0.5, 0.12  # seconds, promised to chat
KINDS = (
    headgate.Kind("chat", headgate.Slo(first_token=FIRST_TOKEN, between_tokens=GAP)),
    headgate.Kind("batch", headgate.Slo(background=True)),
)
REQUESTS = (  # arrival in seconds, prompt and output tokens, kind
    (0.0, 500, 14, 0), (0.0, 300, 26, 0), (0.02, 1800, 10, 1), (0.06, 400, 18, 0),
    (0.15, 300, 8, 0), (0.3, 1500, 12, 1), (0.4, 200, 16, 0), (0.5, 600, 24, 0),
    (0.55, 300, 10, 0), (0.8, 1200, 8, 1), (0.85, 400, 14, 0), (0.9, 200, 12, 0),
)  # fmt: skip
POLICIES = {  # file: the policy, and its idea in one sentence
    "mixed": ("mixed", "Every step runs all decodes; prompts fill the rest of its budget."),
    "sarathi": ("sarathi-spf", "As mixed, but the shortest prompt enters first and some KV stays free."),
    "eb": ("eb:refill=2", "Decode until 2 of 5 slots are idle, then refill them; never both at once."),
    "keep": ("keep", "Promised requests enter by deadline; batch work gives way to them."),
    "slai": ("slai", "Decodes stand back for prompts as long as their promised gap allows."),
    "rad": ("rad", "One prompt runs alone, to its end; decodes run when all slots are taken."),
    "wait": (
        "wait:thresholds=chat=2+batch=1,max_pause=30ms",
        "Chat moves in pairs: its decodes pause until two new prompts wait.",
    ),
}
ROUTER, ENGINES, MOMENT = "density-first", 3, 0.8  # of the picture of a router, with its queues at one moment

WIDTH, LEFT, RIGHT, TOP, LANE, BAR = 720, 118, 24, 76, 21, 13
SQUARE, LINE = "h14v10h-14z", "m0 5h16"
LANE_KEY = (
    ("p", SQUARE, "prompt"),
    ("d", SQUARE, "decode steps"),
    ("w", LINE, "waits"),
    ("o", LINE, "paused, keeps its KV"),
    ("k", "m7 -1v12", "first token due"),
    ("l", "m3 1l8 8m0-8l-8 8", "evicted"),
)
ROUTER_KEY = (
    ("e", SQUARE, "waiting request"),
    ("p", SQUARE, "slot with a prompt"),
    ("d", SQUARE, "slot that decodes"),
    ("x", SQUARE, "free"),
)
ARROW_HEAD = (
    '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="e" d="M0 0L8 4L0 8z"/></marker>'
)
STYLE = """text{font:12px system-ui,sans-serif;fill:#1b1f24}.h{font-size:15px;font-weight:600}.s{fill:#59636e}
.b{fill:#fff}.p{fill:#e69f00}.d{fill:#7388a3}.w,.o{stroke:#59636e;fill:none}.o{stroke-dasharray:2 3}
.g{stroke:#e7eaee}.k{stroke:#1b1f24;stroke-width:2}.l{stroke:#c2182b;stroke-width:2;fill:none}.r{fill:#c2182b}
.t{font-size:10px}.x{fill:#f6f7f9;stroke:#b9c2cc}.e{fill:#59636e}
@media(prefers-color-scheme:dark){text{fill:#e8ebee}.s{fill:#a3adb8}.b{fill:#14181d}.p{fill:#e9ab24}.d{fill:#7f95b0}
.w,.o{stroke:#a3adb8}.g{stroke:#2a313a}.k{stroke:#e8ebee}.l{stroke:#ff8a75}.r{fill:#ff8a75}
.x{fill:#1c2229;stroke:#4a545f}.e{fill:#a3adb8}}"""


class Step(NamedTuple):
    """When it ran, which requests had prompt tokens in it, and which got an output token."""

    start: float
    end: float
    prompts: frozenset[int]
    tokens: frozenset[int]

    @property
    def decodes(self) -> frozenset[int]:
        return self.tokens - self.prompts


@dataclass
class Schedule:
    """All that happened in one run."""

    steps: list[Step] = field(default_factory=list)
    evictions: list[tuple[int, float]] = field(default_factory=list)

    def of(self, request: int) -> list[Step]:
        return [step for step in self.steps if request in step.prompts | step.tokens]

    def tokens(self, request: int) -> list[float]:
        """When each came."""
        return [step.end for step in self.steps if request in step.tokens]

    def late(self, request: int) -> bool:
        return self.tokens(request)[0] > REQUESTS[request][0] + FIRST_TOKEN

    def longest_gap(self, request: int) -> float:
        return max(after - before for before, after in pairwise(self.tokens(request)))


def schedule(policy: str) -> Schedule:
    """Serve the requests, asking the policy at every step."""
    happened = Schedule()

    class Watched(VirtualEngine):
        def evict(self, entry: Entry) -> None:
            happened.evictions.append((entry.id, self.now))
            super().evict(entry)

        def advance(self, wake: float = inf) -> bool:
            ledger, start = self.ledger, self.now
            here = (*ledger.waiting.values(), *ledger.prefilling.values(), *ledger.decoding.values())
            before = [(entry, entry.todo, entry.generated) for entry in here]
            ran = super().advance(wake)
            if ran:
                prompts = frozenset(entry.id for entry, todo, _ in before if entry.todo < todo)
                tokens = frozenset(entry.id for entry, _, had in before if entry.generated > had)
                happened.steps.append(Step(start, self.now, prompts, tokens))
            return ran

    engine = headgate.card_engine(CARD, slots=SLOTS, budget=BUDGET, kv_tokens=KV)
    Simulator(engine, headgate.make_policy(policy, engine), _workload(), leases=False, kind=Watched).run()
    return happened


def _workload(copies: int = 1) -> headgate.Workload:
    arrival, prompt, output, kind = zip(*sorted(REQUESTS * copies, key=itemgetter(0)), strict=True)
    return headgate.Workload.of(prompt, output, arrival=arrival, kind=kind, limit=64, kinds=KINDS)


class Lanes:
    """From times and requests to places."""

    def __init__(self, end: float) -> None:
        self.end = end

    def x(self, time: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * time / self.end

    def y(self, lane: int) -> float:
        """The top of a lane's bar; the engine's own is lane 0."""
        return TOP + LANE * lane

    def bars(self, steps: Iterable[Step], top: float, height: float) -> str:
        """A path of boxes, with a hair between two steps."""
        return "".join(
            f"M{self.x(step.start):.1f} {top:.1f}h{max(self.x(step.end) - self.x(step.start) - 0.7, 0.5):.1f}"
            f"v{height:g}H{self.x(step.start):.1f}z"
            for step in steps
        )


def picture(policy: str, idea: str, happened: Schedule, end: float) -> str:
    """One policy's SVG."""
    lanes = Lanes(end)
    bottom = lanes.y(len(REQUESTS) + 1)
    parts = [*_key(LANE_KEY), *_axis(lanes, bottom)]
    parts += _engine(happened.steps, lanes)
    for request in range(len(REQUESTS)):
        parts += _lane(request, happened, lanes)
    chat = [number for number, row in enumerate(REQUESTS) if row[3] == 0]
    kept = len(chat) - sum(map(happened.late, chat))
    gap = max(map(happened.longest_gap, chat))
    found = f"{kept} of {len(chat)} first tokens within {FIRST_TOKEN:g} s, longest gap {1000 * gap:.0f} ms"
    about = f"{policy}; {SLOTS} slots, steps of {BUDGET} tokens, KV for {KV:,} tokens"
    parts.append(_text(16, bottom + 38, f"chat: {found}; all done after {happened.steps[-1].end:.2f} s"))
    parts.append(_text(16, bottom + 56, f"simulated: {about}", "s"))
    return _svg(idea, f"{policy.partition(':')[0]}: {idea}", parts, bottom + 68)


def _lane(request: int, happened: Schedule, lanes: Lanes) -> Iterator[str]:
    arrival, prompt, output, kind = REQUESTS[request]
    top, own = lanes.y(request + 1), happened.of(request)
    middle = top + BAR / 2
    yield _text(LEFT - 8, top + 11, f"{KINDS[kind].name} {prompt:,} + {output}", anchor="end")
    evicted = [time for number, time in happened.evictions if number == request]
    waits, pauses = "", ""
    for before, after in pairwise([None, *own]):
        since = before.end if before else arrival
        if after is None or lanes.x(after.start) - lanes.x(since) < 1:
            continue
        line = f"M{lanes.x(since):.1f} {middle:g}H{lanes.x(after.start):.1f}"
        if before is None or any(since <= time <= after.start for time in evicted):
            waits += line
        else:
            pauses += line
    yield _path("w", waits)
    yield _path("o", pauses)
    yield _path("p", lanes.bars((step for step in own if request in step.prompts), top, BAR))
    yield _path("d", lanes.bars((step for step in own if request in step.decodes), top, BAR))
    if kind == 0:
        due = f"M{lanes.x(arrival + FIRST_TOKEN):.1f} {top - 2:g}v{BAR + 4}"
        yield _path("l" if happened.late(request) else "k", due)
        if happened.late(request):
            yield _text(lanes.x(own[-1].end) + 5, top + 11, "late", "r")
    for time in evicted:
        at = lanes.x(time)
        yield _path("l", f"M{at - 4:.1f} {middle - 4:g}l8 8m0-8l-8 8")
        yield _text(at + 7, top + 5, "evicted", "r t")


def _engine(steps: Sequence[Step], lanes: Lanes) -> Iterator[str]:
    """All steps; one with prompts and decodes shows both, one above the other."""
    top = lanes.y(0) - 3
    yield _text(LEFT - 8, top + 11, "all steps", "s", "end")
    for kind, own, other in (("p", "prompts", "decodes"), ("d", "decodes", "prompts")):
        shared = [step for step in steps if getattr(step, own) and getattr(step, other)]
        alone = [step for step in steps if getattr(step, own) and not getattr(step, other)]
        half = top if kind == "p" else top + BAR / 2
        yield _path(kind, lanes.bars(alone, top, BAR) + lanes.bars(shared, half, BAR / 2))


def _axis(lanes: Lanes, bottom: float) -> Iterator[str]:
    yield _text(LEFT - 16, bottom + 15, "prompt + output", "s t", "end")
    for tenth in range(0, round(10 * lanes.end) + 1, 2):
        at = lanes.x(tenth / 10)
        yield _path("g", f"M{at:.1f} {TOP - 6}V{bottom}")
        yield _text(at, bottom + 15, f"{tenth / 10:g} s", "s", "middle")


def _key(entries: Sequence[tuple[str, str, str]], left: int = LEFT) -> Iterator[str]:
    at, y = left, 40
    for kind, drawn, words in entries:
        yield _path(kind, f"M{at} {y}{drawn}")
        yield _text(at + 20, y + 10, words)
        at += 34 + round(6.1 * len(words))


def router_picture() -> str:
    """Queues, gate and engines of a fleet at one moment of a simulated run, and the ways of requests."""
    engine = headgate.card_engine(CARD, slots=SLOTS, budget=BUDGET)
    workload = _workload(copies=ENGINES)
    run = headgate.simulate_fleet(engine, "mixed", ROUTER, workload, engines=ENGINES, asynchronous=False)
    table = run.requests
    came, entered, first, left = (
        table[column] <= MOMENT for column in ("arrival", "admitted", "first_token", "finished")
    )
    parts = [ARROW_HEAD, *_key(ROUTER_KEY, 118)]
    parts += [*_box(16, 104, 84, 74, "clients"), _arrow("M100 141H132")]
    parts += [*_box(136, 72, 278, 138, "router: a bounded queue for each class")]
    for kind, top in enumerate((104, 154)):
        waiting = int((came & ~entered & (table["kind"] == kind)).sum())
        parts.append(_text(148, top + 20, KINDS[kind].name))
        parts += [_slot(306 - 18 * place, top + 8, "e" if place < waiting else "x") for place in range(7)]
        parts.append(_arrow(f"M326 {top + 15}C346 {top + 15} 340 141 364 141"))
    parts += [_path("k", "M368 104v26m0 22v40"), _text(378, 124, "gate")]
    for number in range(ENGINES):
        top, here = 72 + 49 * number, table["replica"] == number
        prompts, decodes = (int((here & part).sum()) for part in (entered & ~first, first & ~left))
        slots = "p" * prompts + "d" * decodes + "x" * (SLOTS - prompts - decodes)
        parts += _box(490, top, 206, 40, "")
        parts.append(_text(502, top + 24, f"engine {number + 1}"))
        parts += [_slot(576 + 23 * place, top + 13, slot) for place, slot in enumerate(slots)]
        parts.append(_arrow(f"M368 141H414C454 141 440 {top + 20} 486 {top + 20}"))
    parts += [_arrow("M200 210V236"), _text(118, 252, "full, or the wait too long:", "r")]
    parts += [_text(118, 268, "429 with Retry-After", "r")]
    parts += [
        _text(300, 236, "The gate opens when an engine has room. The router"),
        _text(300, 252, "says which request goes, to which engine, and where"),
        _text(300, 268, "it decodes. A failure before the first token: another try."),
    ]
    parts += [_arrow("M684 210V290H58V182"), _text(300, 306, "streams go back as they are", "s")]
    about = f"simulated: {ROUTER}, {ENGINES} engines with {SLOTS} slots, the requests after {MOMENT:g} s"
    idea = "Requests wait in the router; its gate sends each when an engine has room."
    return _svg(idea, f"Router: {idea}", [*parts, _text(16, 326, about, "s")], 338)


def _box(x: float, y: float, width: float, height: float, words: str) -> Iterator[str]:
    yield f'<rect class="x" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    yield _text(x + 12, y + 22, words)


def _slot(x: float, y: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="14" height="14" rx="3"/>'


def _arrow(drawn: str) -> str:
    return f'<path class="w" d="{drawn}" marker-end="url(#a)"/>'


def _path(kind: str, drawn: str) -> str:
    return f'<path class="{kind}" d="{drawn}"/>' if drawn else ""


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    more = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:g}"{more}>{escape(words, quote=False)}</text>'


def _svg(heading: str, title: str, parts: Iterable[str], height: float) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">',
        f"<title>{escape(title, quote=False)}</title><style>{STYLE}</style>",
        f'<rect class="b" width="{WIDTH}" height="{height:g}"/>',
        _text(16, 24, heading, "h"),
    ]
    return "\n".join([*head, *filter(None, parts), "</svg>", ""])


def pictures() -> dict[str, str]:
    """Every SVG by the name of its file."""
    schedules = {name: schedule(policy) for name, (policy, _) in POLICIES.items()}
    end = ceil(5 * max(happened.steps[-1].end for happened in schedules.values())) / 5
    drawn = {name: picture(*POLICIES[name], schedules[name], end) for name in POLICIES}
    return {f"{name}.svg": text for name, text in {**drawn, "routers": router_picture()}.items()}


def main() -> None:
    """Write them beside the pages."""
    for name, text in pictures().items():
        (PAGES / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
