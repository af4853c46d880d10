"""Numbers of arXiv 2508.01002 (RAD and SLAI), and of a reference simulation, an independent program."""

from __future__ import annotations

PAPER = "Optimal Scheduling Algorithms for LLM Inference: Theory and Practice, arXiv 2508.01002"

# Requests per second at a median TTFT of 0.5 s, and median TTFT (s) at high load, by share of paying users.
CAPACITY: dict[int, dict[str, float]] = {
    5: {"Sarathi": 1.15, "SLAI dyn": 1.45},
    50: {"Sarathi": 1.15, "SLAI dyn": 1.40},
    95: {"Sarathi": 1.15, "SLAI dyn": 1.25},
}
HIGH_LOAD: dict[int, dict[str, float]] = {
    5: {"Sarathi": 1.5, "SLAI dyn": 0.7},
    50: {"Sarathi": 1.5, "SLAI dyn": 0.73},
    95: {"Sarathi": 2.0, "SLAI dyn": 0.75},
}

# The reference simulation: an independent program for the same step times, 2 or 3 seeds.
REFERENCE_CAPACITY: dict[int, dict[str, float]] = {
    5: {
        "vLLM": 1.31,
        "Sarathi": 1.154,
        "Sarathi SPF": 1.224,
        "SLAI FCFS": 1.207,
        "SLAI SPF": 1.261,
        "SLAI dyn": 1.415,
    },
    50: {"SLAI dyn": 1.359},
    95: {"SLAI dyn": 1.243},
}
REFERENCE_HIGH_LOAD: dict[int, dict[str, float]] = {
    5: {"Sarathi": 1.47, "Sarathi SPF": 0.83, "SLAI SPF": 0.83, "SLAI dyn": 0.66},
    50: {"SLAI dyn": 0.73},
    95: {"SLAI dyn": 0.82},
}
# Median TTFT in s and P99 TBT in s (paying, free) by rate, 5 % paying.
REFERENCE_TTFT: dict[str, dict[float, float]] = {
    "Sarathi": {0.8: 0.33, 1.0: 0.41, 1.15: 0.50, 1.3: 0.66, 1.45: 1.03, 1.5: 1.47, 1.6: 11.0},
    "SLAI dyn": {0.8: 0.26, 1.0: 0.30, 1.15: 0.32, 1.3: 0.38, 1.45: 0.54, 1.5: 0.66, 1.6: 0.92},
}
REFERENCE_TBT: dict[str, dict[float, tuple[float, float]]] = {
    "Sarathi": {
        0.8: (0.074, 0.075),
        1.0: (0.085, 0.086),
        1.15: (0.090, 0.091),
        1.3: (0.101, 0.101),
        1.45: (0.109, 0.109),
        1.6: (0.113, 0.113),
    },
    "SLAI dyn": {
        0.8: (0.067, 0.397),
        1.0: (0.076, 0.405),
        1.15: (0.087, 0.385),
        1.3: (0.109, 0.373),
        1.45: (0.113, 0.346),
        1.6: (0.114, 0.314),
    },
}
BOTH_LIMITS = {"Sarathi": 1.15, "SLAI dyn": 1.24}  # P99 TBT of paying users within 0.1 s as well
LONG_PROMPT = 5696  # tokens, the longest tenth
REFERENCE_LONG = 12.4  # their median TTFT at 1.6 requests/s under SLAI dyn, s
REFERENCE_PRIORITY = (5.2, 1.1)  # mean TTFT of paying users at 1.6 requests/s, without and with priority

# Mean least time of a request on the calibrated card, ms, and λ*, with the stop token counted and without.
REFERENCE_BOUND = {"with stop step": (551.926, 1.8118), "without": (551.138, 1.8144)}
# Saturated throughput, requests/s: 4,000 requests at once, unlimited KV; λ* of that sample is 1.7736.
REFERENCE_SATURATED: dict[str, dict[str, float]] = {
    "equation 7": {
        "RAD n=128": 1.620,
        "RAD n=256": 1.679,
        "RAD n=512": 1.716,
        "RAD n=1024": 1.735,
        "RAD n=2048": 1.746,
        "RAD": 1.751,
        "Sarathi 512": 1.754,
        "vLLM": 1.709,
    },
    "full": {
        "RAD chunk 128": 1.174,
        "RAD chunk 256": 1.436,
        "RAD chunk 512": 1.516,
        "RAD chunk 1024": 1.556,
        "RAD chunk 2048": 1.572,
        "Sarathi 512": 1.623,
        "Sarathi 1024": 1.652,
        "vLLM": 1.570,
    },
    "with KV": {"RAD chunk 512": 1.388, "Sarathi 512": 1.602, "vLLM": 1.473},
}
REFERENCE_SAMPLE = 1.7736

# Figure 5: a prompt of 2,048 tokens alone; median TTFT and mean time of a step, ms, by chunk size.
SWEEP_TTFT = {64: 724.3, 128: 386.3, 256: 238.8, 384: 243.9, 512: 212.2, 768: 204.9, 1024: 201.5}
SWEEP_BATCH = {64: 22.72, 128: 24.07, 256: 28.82, 384: 37.80, 512: 46.51, 768: 57.08, 1024: 74.69}
