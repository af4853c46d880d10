"""Serve requests in vLLM under a headgate policy, and read what it did as one reads a simulated run.

    python serve_with_vllm.py MODEL [DTYPE]

MODEL is a folder or a name that vLLM can load; everything else is small enough for a laptop's CPU build. The
same as a server: headgate serve MODEL --policy eb:refill=4 --trace steps.jsonl
"""

import os
import sys

from headgate import Run

REQUESTS, SLOTS = 24, 8
SETTINGS = {"policy": "eb", "set": {"refill": 4}, "trace": "steps.jsonl", "metrics": False}


def main(model: str, dtype: str = "auto") -> None:
    """Two dozen prompts of different lengths on eight slots, then a look at the trace."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        scheduler_cls="headgate.vllm.scheduler",
        additional_config={"headgate": SETTINGS},
        max_num_seqs=SLOTS,
        max_model_len=512,
        enforce_eager=True,
    )
    prompts = [
        "All work and no play makes Jack a dull boy. " * (1 + number % 4) for number in range(REQUESTS)
    ]
    limits = [SamplingParams(max_tokens=4 + number % 9, ignore_eos=True) for number in range(REQUESTS)]
    answers = llm.generate(prompts, limits, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()

    run = Run.load("steps.jsonl")
    both = (run.steps["decodes"] > 0) & (run.steps["prefill"] > 0)
    print(f"{len(answers)} requests answered, {sum(len(a.outputs[0].token_ids) for a in answers)} tokens")
    print(f"the trace has {run.completed().sum()} of them, {run.requests['output'].sum()} tokens")
    print(f"steps that mixed prefill and decode: {both.sum()}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name a model: python serve_with_vllm.py MODEL [DTYPE]")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    main(*sys.argv[1:])
