"""The few of vLLM's metrics that the router reads."""

from __future__ import annotations

import re
from math import isfinite

from headgate.live.route.upstream import Load

ALARMS = (
    "vllm:nixl_num_notifications_after_expiry_total",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:num_preemptions_total",
)
NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    *ALARMS,
)
_SAMPLE = {
    name: re.compile(rb"\n" + name.encode() + rb"(?:\{[^\n]*\})? ([0-9.eE+-]+)(?: [0-9]+)?(?=\n|$)")
    for name in NAMES
}


def read_load(text: bytes, now: float) -> Load:
    """Sums over all label sets (several engine cores behind one address); absent ones are 0."""
    text = b"\n" + text  # a pattern that begins with a letter is found fast, one that begins with ^ is not
    found = {name: _total(name, text) for name in NAMES}
    return Load(
        running=int(found["vllm:num_requests_running"]),
        waiting=int(found["vllm:num_requests_waiting"]),
        kv_usage=found["vllm:kv_cache_usage_perc"],
        prompt_tokens=found["vllm:prompt_tokens_total"],
        generated=found["vllm:generation_tokens_total"],
        alarms={name: found[name] for name in ALARMS},
        at=now,
    )


def _total(name: str, text: bytes) -> float:
    if name.encode() not in text:
        return 0.0
    values = [float(each) for each in _SAMPLE[name].findall(text)]
    return sum(each for each in values if isfinite(each) and each >= 0)
