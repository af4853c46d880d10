"""Every command says what share of the step time lies outside what the card measured."""

import pytest

LONG = (
    "--prompt",
    150000,
    "--output",
    20,
    "--model-len",
    200000,
    "--kv-tokens",
    800000,
    "--workload",
    "fixed",
)
SAID = "outside what card cal-h200-qwen3-8b measured"


@pytest.mark.parametrize(
    "args",
    [
        ("simulate", "--rate", 0.05, "--requests", 30),
        ("sweep", "--over", "rate=0.05,0.1", "--requests", 20, "--jobs", 1),
        ("plan", "capacity", "--slo", "ttft=60s@p95", "--requests", 40, "--seeds", 1, "--jobs", 1),
        ("plan", "capacity", "--find", "engines", "--rate", 0.2, "--slo", "ttft=60s@p95", "--requests", 40,
         "--seeds", 1, "--jobs", 1),
        ("plan", "threshold", "--rate", 0.1),
        ("plan", "flags", "--clients", 8),
        ("plan", "wait", "--rate", 0.03),
        ("plan", "fluid", "--rate", 0.2, "--engines", 2),
    ],
    ids=lambda args: " ".join(map(str, args[:4])),
)  # fmt: skip
def test_long_prompts_are_said_to_be_extrapolated(headgate, args):
    said = headgate(*args, *LONG)
    text = " ".join(said.out.split())
    assert said.code == 0 and SAID in text and "prompt tokens already computed in" in text
