"""CPU time of the router's event loop, and how long it stands still, for the most expensive bodies we know.

`python -m benchmarks.client_bodies`. Each body has nearly 32 MiB, the most that the router takes by default.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import pairwise

from headgate.live.route.request import LOOKED_AT, RefusedError, Turns, read_body, reading

LARGE = 31 << 20
TRIES = 3
NAMES = [quoted for name, quoted in LOOKED_AT.items() if name != "kv_transfer_params"]
OWN = b",".join(name + b":0" for name in NAMES)
BODIES = {
    "one prompt of plain text": (b'{"prompt":"', b"some words ", b'"}'),
    "one prompt of quotes and colons": (b'{"prompt":"', b'a: \\"b\\", ', b'"}'),
    "one field of spaces": (b'{"model":', b" ", b'"m"}'),
    "token ids": (b'{"prompt":[', b"123456,", b"0]}"),
    "millions of fields": (b"{", b'"%d":0,', b'"z":0}'),
    "millions of fields in a field": (b'{"x":{', b'"%d":0,', b'"z":0}}'),
    "millions of objects in a list": (b'{"messages":[', b'{"a":0},', b"0]}"),
    "millions of texts with a colon": (b'{"x":[', b'":",', b"0]}"),
    "millions of texts with a bracket": (b'{"x":[', b'["["],', b"0]}"),
    "brackets and quotes that never end": (b'{"x":', b'[{"', b""),
    "names that are read, in a list": (b'{"x":[', b",".join(NAMES) + b",", b"0]," + OWN + b"}"),
    "names that are read, in objects": (b'{"x":[', b"{" + OWN + b"},", b"0]," + OWN + b"}"),
}


def made(first: bytes, part: bytes, last: bytes) -> bytes:
    """A body of many parts; a number in a part is its own."""
    if b"%d" not in part:
        return first + part * ((LARGE - len(first) - len(last)) // len(part)) + last
    return first + b"".join(part % number for number in range(LARGE // (len(part) + 5))) + last


def seconds(body: bytes) -> tuple[float, str]:
    """The least of a few tries, and the answer."""
    least, said = float("inf"), "read"
    for _ in range(TRIES):
        began = time.process_time()
        try:
            read_body(body, "/v1/completions")
        except RefusedError as refused:
            said = f"refused: {refused}"
        least = min(least, time.process_time() - began)
    return least, said


async def stall(body: bytes) -> float:
    """The longest CPU time between two turns of the loop while the body is read, the least of a few tries."""
    least = float("inf")
    for _ in range(TRIES):
        times: list[float] = []
        beating = asyncio.create_task(beat(times))
        await asyncio.sleep(0)
        with suppress(RefusedError):
            await Turns().finish(reading(body, "/v1/completions"))
        beating.cancel()
        times.append(time.process_time())
        least = min(least, max(after - before for before, after in pairwise(times)))
    return least


async def beat(times: list[float]) -> None:
    while True:
        times.append(time.process_time())
        await asyncio.sleep(0)


def main() -> None:
    print("| body | MiB | CPU seconds | longest stall, ms | answer |\n|---|---|---|---|---|")
    for name, parts in BODIES.items():
        body = made(*parts)
        took, said = seconds(body)
        stood = 1000 * asyncio.run(stall(body))
        print(f"| {name} | {len(body) / (1 << 20):.0f} | {took:.3f} | {stood:.1f} | {said} |")


if __name__ == "__main__":
    main()
