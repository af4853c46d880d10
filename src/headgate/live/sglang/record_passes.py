"""Writes what SGLang tells of each forward pass to a file that `headgate calibrate --from-passes` reads.

Run it beside `sglang serve ... --enable-forward-pass-metrics`, in SGLang's environment, with the address that
its log names ("FPM: ZMQ PUB bound on ..."): python -m headgate.live.sglang.record_passes ADDRESS FILE
"""

from __future__ import annotations

import sys

import msgspec
import zmq
from sglang.srt.observability.forward_pass_metrics import decode


def record(address: str, file: str, most: int | None = None) -> int:
    """Append messages, a line each, until interrupted or so many are there."""
    written = 0
    with zmq.Context() as context, context.socket(zmq.SUB) as messages, open(file, "ab", buffering=0) as out:
        messages.subscribe(b"")
        messages.connect(address)
        try:
            while most is None or written < most:
                *_, payload = messages.recv_multipart()
                out.write(msgspec.json.encode(decode(payload)) + b"\n")
                written += 1
        except KeyboardInterrupt:
            pass
    return written


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m headgate.live.sglang.record_passes ADDRESS FILE")
    print(f"{record(sys.argv[1], sys.argv[2])} messages in {sys.argv[2]}")
