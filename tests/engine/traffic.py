"""Random small engines and what happens to them: who comes when, who hangs up, what the operator does."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from language import WORDS, Truth
from schedulers import EngineShape, reset_loses_drafts
from vllm.v1.core.sched.interface import PauseState

LAST_ARRIVAL = 120  # steps


class Comer(NamedTuple):
    """One request and its fate."""

    name: str
    step: int
    prompt: list[int]
    limit: int
    stops: tuple[int, ...]
    priority: int
    adapter: int
    hangs_up: int | None  # at that step, if still there
    midway: bool  # while the step is in flight, not between two steps
    grammar: int = 0  # steps until its grammar is compiled; 0: it has none
    remote: int = 0  # tokens of its prompt whose KV is elsewhere
    late: int = 0  # steps until it is here; 0: it comes with the step

    def truth(self, longest: int) -> Truth:
        """What it must say."""
        return Truth(self.prompt, self.limit, self.stops, self.adapter, longest)


class Traffic(NamedTuple):
    """Everything that will happen, by the number of the step."""

    comers: list[Comer]
    throttled: frozenset[int]
    pauses: dict[int, PauseState]
    resets: dict[int, bool]  # with or without those that run


def draw_shape(random: Random, *, ahead: bool, runner: int) -> EngineShape:
    """Mostly short of memory, slots or tokens."""
    block = random.choice([2, 4, 16])
    longest = random.choice([40, 90])
    least = -(-longest // block)
    running = random.randint(1, 9)
    chunked = random.random() < 0.75
    return EngineShape(
        block=block,
        blocks=least + random.choice([0, 1, 3, least, 6 * least]),
        running=running,
        budget=random.randint(running, 40) if chunked else longest + random.randint(0, 40),
        longest=longest,
        chunked=chunked,
        caching=random.random() < 0.6,
        priorities=random.random() < 0.3,
        ahead=ahead,
        runner=runner,
        watermark=random.choice([0.0, 0.0, 0.0, 0.1]),
    )


def draw_traffic(
    random: Random, shape: EngineShape, *, adapters: int = 0, calm: bool = False, tiny: bool = False
) -> Traffic:
    """A few dozen requests; when `calm`, nobody hangs up and nobody pauses the engine.

    When `tiny`, most prompts have one token that is not in the prefix cache, alone or behind whole blocks.
    """
    prefixes = [[random.randrange(WORDS) for _ in range(random.randint(1, shape.longest // 2))] for _ in "ab"]
    last = random.choice([0, 10, LAST_ARRIVAL])
    comers = [
        _comer(f"r{number}", random, shape, prefixes, last, adapters, calm)
        for number in range(random.randint(1, 30))
    ]
    if tiny:
        comers = [_tiny(comer, random, shape, prefixes[0]) for comer in comers]
    if calm:
        return Traffic(comers, frozenset(), {}, {})
    throttled = frozenset(step for step in range(400) if random.random() < 0.2)
    traffic = Traffic(
        comers,
        throttled if random.random() < 0.3 else frozenset(),
        _pauses(random) if random.random() < 0.3 else {},
        # vLLM itself cannot reset while KV is being loaded.
        {random.randrange(200): random.random() < 0.5}
        if random.random() < 0.3 and not shape.connector
        else {},
    )
    if shape.drafts and shape.ahead and reset_loses_drafts():
        return traffic._replace(resets=dict.fromkeys(traffic.resets, False))
    return traffic


def _comer(
    name: str,
    random: Random,
    shape: EngineShape,
    prefixes: list[list[int]],
    last: int,
    adapters: int,
    calm: bool,
) -> Comer:
    prompt = list(random.choice(prefixes)) if random.random() < 0.4 else []
    prompt += [random.randrange(WORDS) for _ in range(random.randint(0 if prompt else 1, 30))]
    prompt = prompt[: shape.longest - 1]
    step = random.randint(0, last)
    leaves = not calm and random.random() < 0.25
    return Comer(
        name=name,
        step=step,
        prompt=prompt,
        limit=random.choice([1, 2, 3, 9, 30, 200]),
        stops=tuple(range(random.randrange(60))) if random.random() < 0.3 else (),
        priority=random.randint(0, 3),
        adapter=random.randint(0, adapters) if adapters else 0,
        hangs_up=step + random.choice([0, 1, 2, 5, 20, 60]) if leaves else None,
        midway=random.random() < 0.5,
        grammar=random.randint(1, 12) if not calm and random.random() < 0.1 else 0,
        remote=random.randint(1, 40) if shape.connector and random.random() < 0.6 else 0,
        late=random.randint(0, 5),
    )


def _tiny(comer: Comer, random: Random, shape: EngineShape, prefix: list[int]) -> Comer:
    """One token, or the first blocks of a common prefix and one token more; one in four stays as it is."""
    kind = random.randrange(4)
    blocks = random.randint(1, max(1, len(prefix) // shape.block)) if kind == 1 else 0
    prompt = [*prefix[: blocks * shape.block], random.randrange(WORDS)]
    return comer._replace(prompt=prompt) if kind < 3 and len(prompt) < shape.longest else comer


def _pauses(random: Random) -> dict[int, PauseState]:
    """The operator pauses, in one way or the other, and always lets go again."""
    pauses, step = {}, 0
    for _ in range(random.randint(1, 3)):
        step += random.randint(1, 40)
        pauses[step] = random.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
        step += random.randint(1, 15)
        pauses[step] = PauseState.UNPAUSED
    return pauses
