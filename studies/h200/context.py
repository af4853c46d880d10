"""What earlier tokens cost and save in one vLLM engine: `python -m studies.h200.context --help`.

Two scenes on the shape of Qwen3-8B with prefix caching on. `long`: prompts of 8,000 to 100,000 tokens, one at
a time. `shared`: conversations behind shared system prompts, at their times of arrival. Each ends with what
the simulator says of the same requests; `python -m studies.h200.context_table FILE...` makes the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from headgate.live.calibrate.campaign import WantedEngine, about, start
from headgate.workloads.lengths import Geometric
from headgate.workloads.sessions import SharedPrefix, as_sessions
from headgate.workloads.workload import PRIVATE, Contents, Workload
from studies.h200 import arms, models
from studies.h200.record import Row
from studies.h200.run import ENVIRONMENT, Results, warm_up
from studies.h200.scenes import Session

PROMPTS = (2_000, 8_000, 16_000, 32_000, 64_000, 100_000)
SYSTEM = SharedPrefix(2048, 20)
TURNS, THINK = 4.0, 8.0
ADDED, OUTPUT = 300, 100  # mean tokens of a turn
SEED = 5


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.h200.context", description=__doc__)
    add = parser.add_argument
    add("--scenes", nargs="+", default=["long", "shared"], choices=("long", "shared"))
    add("--arms", nargs="+", default=["plain", "slai"], help="shared: plain, or a policy")
    add("--rate", type=float, default=14.0, help="shared: conversations' turns a second")
    add("--measure", type=float, default=45.0, help="shared: seconds of arrivals")
    add("--times", type=int, default=3, help="long: each length so often")
    add("--slots", type=int, default=512)
    add("--budget", type=int, default=8192)
    add("--longest", type=int, default=110_000)
    add("--card", default="cal-h200-qwen3-8b")
    add("--seconds", type=float, default=400.0, help="begin nothing that could end after this")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "h200-context")))
    add("--tiny", action="store_true", help="a tiny model without a GPU, to try this script")
    return parser.parse_args(argv)


def talks(rate: float, seconds: float, shrink: int = 1) -> Workload:
    """Turns in `seconds` of a stream of conversations that has gone on for a while; outputs are private."""
    rng = np.random.default_rng(SEED)
    count = round(rate * (seconds + 6 * TURNS * THINK))
    added = np.maximum(1, Geometric(ADDED / shrink).draw(count, rng))
    output = np.maximum(2, Geometric(OUTPUT / shrink).draw(count, rng))
    arrival = np.sort(rng.uniform(0.0, count / rate, count))
    drawn = Workload.of(added, output, arrival=arrival, limit=output)
    system = SharedPrefix(SYSTEM.tokens // shrink, SYSTEM.different)
    made = as_sessions(drawn, seed=SEED, turns=TURNS, think=THINK, prefixes=(system,))
    begin = 3 * TURNS * THINK
    mine = made.subset((made.arrival >= begin) & (made.arrival < begin + seconds))
    assert mine.contents is not None
    contents = Contents.of([*row, (PRIVATE, 0)] for row in mine.contents.rows())
    return Workload.of(
        mine.prompt, mine.output, arrival=mine.arrival - begin, limit=mine.output, contents=contents
    )


class Words:
    """Tokens of pieces: the same for equal keys, others for every private piece."""

    def __init__(self, vocabulary: int, longest: int) -> None:
        self._vocabulary, self._longest = vocabulary, longest
        self._known: dict[int, list[int]] = {}

    def of(self, pieces: tuple[tuple[int, int], ...]) -> list[int]:
        """The prompt of one request."""
        return [word for key, tokens in pieces if tokens for word in self._stream(key)[:tokens]]

    def _stream(self, key: int) -> list[int]:
        if key not in self._known:
            rng = np.random.default_rng([SEED, key % (1 << 32)])
            self._known[key] = rng.integers(2, self._vocabulary, self._longest).tolist()
        return self._known[key]


def sampling(output: int) -> Any:
    """Greedy, to the last token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=kind
    )


def long(asked: argparse.Namespace, session: Session, results: Results) -> None:
    """Each length alone in the engine, several times; no prompt has anything in common with another."""
    rng = np.random.default_rng(SEED)
    shrink = 200 if asked.tiny else 1
    for number in range(asked.times):
        for prompt in PROMPTS:
            session.record.forget()
            words = rng.integers(2, session.vocabulary, prompt // shrink).tolist()
            name = session.queue_tokens(words, sampling(2))
            while session.alive:
                session.step()
            first = session.record.first[int(name)] - session.record.arrival[int(name)]
            rows = [list(row) for row in session.record.rows]
            results.add(
                {"scene": "long", "round": number, "prompt": len(words), "ttft": first, "steps": rows}
            )


def shared(asked: argparse.Namespace, session: Session, results: Results, arm: str) -> None:
    """All turns at their times; the cache begins empty."""
    load = talks(asked.rate, asked.measure, 16 if asked.tiny else 1)
    words = Words(session.vocabulary, int(load.prompt.max()) + 1)
    pieces = load.pieces() or []
    prompts = [words.of(row)[:tokens] for row, tokens in zip(pieces, load.prompt.tolist(), strict=True)]
    session.llm.reset_prefix_cache()
    session.record.forget()
    session.switch(arm)
    cached = np.zeros(len(prompts), int)
    base, begin, sent = session.next, perf_counter(), 0
    while sent < len(prompts) or session.alive:
        while sent < len(prompts) and load.arrival[sent] <= perf_counter() - begin:
            session.queue_tokens(prompts[sent], sampling(int(load.output[sent])))
            session.record.arrival[base + sent] = begin + load.arrival[sent]
            sent += 1
        if not session.alive:
            sleep(max(0.0, load.arrival[sent] - (perf_counter() - begin)))
            continue
        for each in session.llm.llm_engine.step():
            if each.finished:
                session.alive.discard(each.request_id)
                cached[int(each.request_id) - base] = each.num_cached_tokens or 0
    ended = session.record.rows[-1].ended - begin
    first = session.record.first[base : base + sent] - session.record.arrival[base : base + sent]
    gaps = np.concatenate([each.gaps for each in session.record.tokens])
    gaps = gaps[~np.isnan(gaps)]
    line = {
        "scene": "shared",
        "arm": arm,
        "rate": asked.rate,
        "seconds": asked.measure,
        "requests": sent,
        "prompt_tokens": int(load.prompt.sum()),
        "cached_tokens": int(cached.sum()),
        "ended": ended,
        "fallen": arms.fallen(session.core.scheduler),
        "ttft": np.round(first, 5).tolist(),
        "cached": cached.tolist(),
        "gap": {f"p{q}": float(np.quantile(gaps, q / 100)) for q in (50, 95, 99)},
    }
    results.add(line)
    table = np.array(session.record.rows, dtype=float).reshape(-1, len(Row._fields))
    name = f"shared_{arm.replace(':', '-')}.npz"
    np.savez_compressed(results.place / name, log=table, columns=np.array(Row._fields))


def main() -> None:
    """Start one engine, play the scenes."""
    began = perf_counter()
    asked = options()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    shape = models.TINY if asked.tiny else models.QWEN3_8B
    more: dict[str, object] = {"enable_prefix_caching": True}
    if asked.tiny:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
        asked.slots, asked.budget, asked.longest = 16, 512, 1024
        more |= {"enforce_eager": True, "dtype": "float32", "num_gpu_blocks_override": 800, "block_size": 32}
    else:
        more |= {"gpu_memory_utilization": 0.92, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as place:
        folder = shape.write(Path(place) / "model", asked.longest)
        wanted = WantedEngine(str(folder), asked.slots, asked.budget, asked.longest, True, None, more)
        llm = start(wanted)
        said = about(llm, wanted, "context", asked.slots)
        engine = arms.limits(asked.card, asked.slots, asked.budget, said.kv_tokens, asked.longest, said.block)
        session = Session(llm, engine, shape.vocabulary)
        results = Results(asked.out)
        results.add(
            {
                "setup": {key: value for key, value in vars(asked).items() if key != "out"},
                "kv_tokens": said.kv_tokens,
                "block": said.block,
                "gpu": said.gpu,
                "versions": said.versions,
                "settings": said.settings,
                "start_seconds": perf_counter() - began,
            }
        )
        warm_up(session)
        if "long" in asked.scenes:
            session.switch(arms.PLAIN)
            long(asked, session, results)
        for arm in asked.arms if "shared" in asked.scenes else ():
            if perf_counter() - began + asked.measure + 15 > asked.seconds:
                print(json.dumps({"left out": arm}), flush=True)
                break
            shared(asked, session, results, arm)


if __name__ == "__main__":
    main()
