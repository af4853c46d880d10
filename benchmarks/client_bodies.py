"""CPU time of the router's event loop for the most expensive bodies we know.

`python -m benchmarks.client_bodies`. Each body has nearly 32 MiB, the most that the router takes by default.
"""

from __future__ import annotations

import time

from headgate.live.route.answers import RefusedError
from headgate.live.route.body import QUOTED, read_body

LARGE = 31 << 20
TRIES = 3
NAMES = [quoted for name, quoted in QUOTED if name != "kv_transfer_params"]
OWN = b",".join(name + b":0" for name in NAMES)
BODIES = {
    "one prompt of plain text": (b'{"prompt":"', b"some words ", b'"}'),
    "one prompt of quotes and colons": (b'{"prompt":"', b'a: \\"b\\", ', b'"}'),
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


def main() -> None:
    print("| body | MiB | CPU seconds | answer |\n|---|---|---|---|")
    for name, parts in BODIES.items():
        body = made(*parts)
        took, said = seconds(body)
        print(f"| {name} | {len(body) / (1 << 20):.0f} | {took:.3f} | {said} |")


if __name__ == "__main__":
    main()
