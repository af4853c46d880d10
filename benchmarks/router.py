"""What the router costs: CPU per relayed event, transit added, CPU of a short request, time of a hang-up.

Run: python -m benchmarks.router [--streams 100 --rate 2000 --seconds 10 --engines 1]
     python -m benchmarks.router --table [--seconds 5 --repeats 3], for ratios at 20, 100 and 500 streams
     python -m benchmarks.router --servers [--seconds 5 --repeats 3], for what the HTTP server alone takes
On a quiet machine with four cores: make bench-route (500 streams, 10,000 events/s, four engines).

Engines, the router and the client are processes of their own; `direct` is the client at the engines. Where
vllm-router (Rust) is installed it is measured beside ours. On a shared machine only CPU and ratios are sound.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from statistics import median
from typing import Any

LEVELS = [20, 100, 500]  # streams, or short requests, at a time
PACE = 20.0  # events a second of a stream
WARM = 10  # tries
SERVE = "from headgate.cli import main; main()"


def cpu(process: subprocess.Popen[str]) -> float:
    """Seconds of CPU that its threads have used, to the microsecond."""
    used = 0
    for thread in os.listdir(f"/proc/{process.pid}/task"):
        with suppress(FileNotFoundError), open(f"/proc/{process.pid}/task/{thread}/schedstat") as file:
            used += int(file.read().split()[0])
    return used / 1e9


def memory(process: subprocess.Popen[str], which: str) -> int:
    """KiB that it has (VmRSS) or had at most (VmHWM)."""
    with open(f"/proc/{process.pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(which))


def part(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.router_parts", *words]


def started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def ours(engines: list[int]) -> tuple[subprocess.Popen[str], int]:
    """`headgate route` before the engines, and its port."""
    urls = [word for port in engines for word in ("--engine", f"http://127.0.0.1:{port}")]
    router = started(
        [sys.executable, "-c", SERVE, "route", *urls, "--slots", "4096", "--port", "0",
         "--admin", "127.0.0.1:0"]
    )  # fmt: skip
    assert router.stdout is not None
    for line in router.stdout:
        if "listening on" in line:
            return router, int(line.split("http://127.0.0.1:")[1].split(",")[0])
    raise RuntimeError("the router did not start")


def vllm_router(engines: list[int]) -> tuple[subprocess.Popen[str], int]:
    """The Rust router before the engines."""
    port = 20_000 + os.getpid() % 10_000
    router = started(
        [
            "vllm-router",
            "--worker-urls",
            *(f"http://127.0.0.1:{port}" for port in engines),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
    )
    for _ in range(200):
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return router, port
        time.sleep(0.1)
    router.kill()
    raise RuntimeError("vllm-router did not start")


def measured(
    ports: list[int], router: subprocess.Popen[str] | None, streams: int, seconds: float
) -> dict[str, Any]:
    """The client's figures, and the router's CPU per event and per request."""
    before = cpu(router) if router else 0.0
    done = subprocess.run(
        part(
            "client",
            *(word for port in ports for word in ("--port", str(port))),
            *("--streams", str(streams), "--seconds", str(seconds)),
        ),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    used = (cpu(router) if router else 0.0) - before
    found["us_per_event"] = 1e6 * used / max(found["events"], 1)
    found["us_per_request"] = 1e6 * used / max(found["requests"], 1)
    return found


def race(
    streams: int, rate: float, seconds: float, tokens: int, engines: int = 1
) -> dict[str, dict[str, Any]]:
    """Direct, ours and vllm-router, one after the other, before the same engines."""
    found: dict[str, dict[str, Any]] = {}
    makers: dict[str, Callable[[list[int]], tuple[subprocess.Popen[str], int]]] = {"headgate route": ours}
    if shutil.which("vllm-router"):
        makers["vllm-router"] = vllm_router
    with ExitStack() as stack:
        ports = []
        for _ in range(engines):
            engine = started(part("engine", "--tokens", str(tokens), "--gap", str(streams / rate)))
            stack.callback(_ended, engine)
            assert engine.stdout is not None
            ports.append(int(engine.stdout.readline()))
        found["direct"] = measured(ports, None, streams, seconds)
        for name, make in makers.items():
            began = time.monotonic()
            router, at = make(ports)
            start, small = time.monotonic() - began, memory(router, "VmRSS")
            try:
                for _ in range(WARM):  # until it has found its engines
                    if measured([at], router, streams, min(2.0, seconds))["events"]:
                        break
                found[name] = measured([at], router, streams, seconds) | {"start": start}
                found[name]["kib_per_stream"] = (memory(router, "VmHWM") - small) / streams
            finally:
                _ended(router)
    return found


def relay(part_name: str) -> Callable[[list[int]], tuple[subprocess.Popen[str], int]]:
    """A relay without any safety, for what Python and its libraries take at least."""

    def make(engines: list[int]) -> tuple[subprocess.Popen[str], int]:
        process = started(part(part_name, "--port", str(engines[0])))
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    return make


def table(levels: list[int], seconds: float, repeats: int) -> None:
    """CPU per event and per short request of all that are installed, in turn, with ratios to vllm-router."""
    makers = {"headgate route": ours, "vllm-router": vllm_router, "aiohttp alone": relay("aiohttp")}
    makers |= {"httptools alone": relay("bare")} if find_spec("httptools") else {}
    if not shutil.which("vllm-router"):
        raise SystemExit("vllm-router is not installed: pip install vllm-router")
    print(f"CPU in us, median (least to most of {repeats}); ratio of the medians\n")
    print(f"| at a time | per | {' | '.join(makers)} | ratio |\n|---|---|{'---|' * len(makers)}---|")
    for streams in levels:
        for what, tokens in (("short request", 1), ("event", 100)):
            with ExitStack() as stack:
                engine = started(part("engine", "--tokens", str(tokens), "--gap", str(1 / PACE)))
                stack.callback(_ended, engine)
                assert engine.stdout is not None
                port = int(engine.stdout.readline())
                runs = {name: make([port]) for name, make in makers.items()}
                for process, _ in runs.values():
                    stack.callback(_ended, process)
                used: dict[str, list[float]] = {name: [] for name in makers}
                for repeat in range(repeats + 1):  # the first warms up
                    for name, (process, at) in runs.items():
                        took = measured([at], process, streams, seconds if repeat else 2.0)
                        if repeat:
                            used[name].append(took["us_per_request" if tokens == 1 else "us_per_event"])
            shown = [f"{median(each):.0f} ({min(each):.0f} to {max(each):.0f})" for each in used.values()]
            ratio = median(used["headgate route"]) / median(used["vllm-router"])
            print(f"| {streams} | {what} | {' | '.join(shown)} | {ratio:.2f} |", flush=True)


def servers(levels: list[int], seconds: float, repeats: int) -> None:
    """CPU of a short answer by servers with nothing behind them: aiohttp's, and one of our own."""
    print(f"CPU in us per short answer, median (least to most of {repeats})\n")
    print("| at a time | aiohttp's server | own protocol on aiohttp's parser |\n|---|---|---|")
    for streams in levels:
        shown = []
        for name in ("aiohttp-server", "own-server"):
            with ExitStack() as stack:
                process, at = relay(name)([0])
                stack.callback(_ended, process)
                took = [
                    measured([at], process, streams, seconds)["us_per_request"] for _ in range(repeats + 1)
                ]
            shown.append(f"{median(took[1:]):.0f} ({min(took[1:]):.0f} to {max(took[1:]):.0f})")
        print(f"| {streams} | {' | '.join(shown)} |", flush=True)


def hung_up(tries: int) -> dict[str, float]:
    """How long after a client's hang-up the engine's connection is closed, one stream at a time."""
    command = part("hangups", "--tries", str(tries))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as pair:
        assert pair.stdin is not None and pair.stdout is not None
        router, at = ours([int(pair.stdout.readline())])
        try:
            print(at, file=pair.stdin, flush=True)
            found: dict[str, float] = json.loads(pair.stdout.readline())
        finally:
            _ended(router)
    return found


def _ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def show(title: str, found: dict[str, dict[str, Any]], column: str) -> None:
    print(f"\n{title}")
    for name, each in found.items():
        times = f"transit p50 {each['p50_ms']:7.2f} ms  p99 {each['p99_ms']:7.2f} ms"
        print(
            f"  {name:<15} {each['events']:>8} events  {times}"
            + (f"  CPU {each[column]:6.0f} us" if name != "direct" else "")
        )


def print_table(
    streams: int, rate: float, long: dict[str, dict[str, Any]], short: dict[str, dict[str, Any]]
) -> None:
    """The same for docs/route.md."""
    what = f"{streams} streams, {rate:,.0f} events/s"
    print(f"\n| {what} | transit p50 | transit p99 | CPU per event | CPU of a request with one event |")
    print("|---|---|---|---|---|")
    for name, each in long.items():
        used = ("-", "-")
        if name != "direct":
            used = f"{each['us_per_event']:.0f} us", f"{short[name]['us_per_request']:.0f} us"
        print(f"| {name} | {each['p50_ms']:.2f} ms | {each['p99_ms']:.2f} ms | {used[0]} | {used[1]} |")
    if "vllm-router" not in long:
        print("\nvllm-router is not installed here.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2000.0, help="events per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=1, help="processes")
    parser.add_argument("--table", action="store_true", help="ratios to vllm-router at low and high load")
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS, help="streams, with --table")
    parser.add_argument("--servers", action="store_true", help="servers with nothing behind them")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if given.table or given.servers:
        (table if given.table else servers)(given.levels, given.seconds, given.repeats)
        return
    long = race(given.streams, given.rate, given.seconds, tokens=100, engines=given.engines)
    show(f"{given.streams} streams, {given.rate:.0f} events/s: CPU per event", long, "us_per_event")
    short = race(8, 4000.0, given.seconds, tokens=1)
    show("requests of one event, 8 at a time: CPU per request", short, "us_per_request")
    print_table(given.streams, given.rate, long, short)
    gone = hung_up(500)
    print(
        f"\nhang-up to engine, 500 tries: p50 {gone['p50_ms']:.1f} ms, p99 {gone['p99_ms']:.1f} ms, worst "
        f"{gone['worst_ms']:.1f} ms (target 50)"
    )
    mine = long["headgate route"]
    added = [mine[name] - long["direct"][name] for name in ("p50_ms", "p99_ms")]
    print(
        f"\nadded transit p50 {added[0]:.2f} ms, p99 {added[1]:.2f} ms (targets 0.5 and 5 on a quiet machine)"
    )
    print(f"CPU per event {mine['us_per_event']:.0f} us (target 35 at 10,000 events/s)")
    print(f"start {mine['start']:.2f} s (target 1)")
    print(f"memory per stream {mine['kib_per_stream']:.0f} KiB (target 64)")
    if "vllm-router" in long:
        ratio = mine["us_per_event"] / long["vllm-router"]["us_per_event"]
        print(f"CPU per event, ours over vllm-router: {ratio:.2f}")


if __name__ == "__main__":
    main()
