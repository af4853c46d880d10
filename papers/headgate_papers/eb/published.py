"""Published tables of arXiv 2606.00516, digit by digit."""

from __future__ import annotations

SOURCE = "Threshold-Based Exclusive Batching for LLM Inference, arXiv 2606.00516 (ICML 2026)"
RTX, H200 = "RTX PRO 6000", "H200"
CARDS = {  # the published coefficients of each GPU and model
    (RTX, "8B"): "pub-rtx-pro-6000-qwen3-8b",
    (RTX, "30B"): "pub-rtx-pro-6000-qwen3-30b-a3b",
    (H200, "8B"): "pub-h200-qwen3-8b",
    (H200, "30B"): "pub-h200-qwen3-30b-a3b",
}
MEASURED = "linear-h200-qwen3-8b"  # our own card, of another engine version
Triple = tuple[float, float, float]

# Table 2: requests per second of v0, v1 and EB(k̂*) by GPU, model and data set.
TABLE2: dict[tuple[str, str, str], Triple] = {
    (RTX, "8B", "ShareGPT"): (15.45, 17.07, 19.68),
    (RTX, "8B", "LongBench"): (8.17, 8.35, 8.66),
    (RTX, "8B", "WildChat"): (10.39, 12.75, 14.19),
    (RTX, "8B", "NuminaMath"): (0.68, 0.73, 0.74),
    (RTX, "30B", "ShareGPT"): (12.38, 15.98, 15.48),
    (RTX, "30B", "LongBench"): (11.48, 11.13, 11.67),
    (RTX, "30B", "WildChat"): (6.91, 9.39, 10.48),
    (RTX, "30B", "NuminaMath"): (0.42, 0.52, 0.48),
    (H200, "8B", "ShareGPT"): (19.36, 41.93, 42.88),
    (H200, "8B", "LongBench"): (14.22, 15.77, 15.81),
    (H200, "8B", "WildChat"): (17.58, 20.87, 21.50),
    (H200, "8B", "NuminaMath"): (1.49, 1.95, 1.96),
    (H200, "30B", "ShareGPT"): (17.68, 48.96, 47.72),
    (H200, "30B", "LongBench"): (21.31, 24.43, 24.03),
    (H200, "30B", "WildChat"): (17.59, 26.46, 26.66),
    (H200, "30B", "NuminaMath"): (1.42, 1.83, 1.68),
}

# Figure 5, as its text prints it: mean TPOT in ms (TTFT in s) of v1 and EB(k̂*), 8B.
FIGURE5: dict[tuple[str, str, str], tuple[float, float]] = {
    (RTX, "ShareGPT", "TPOT"): (268.97, 93.68),
    (RTX, "WildChat", "TPOT"): (173.33, 113.22),
    (RTX, "NuminaMath", "TPOT"): (81.75, 65.22),
    (RTX, "LongBench", "TTFT"): (175.56, 169.64),
    (H200, "WildChat", "TPOT"): (122.97, 79.04),
    (H200, "NuminaMath", "TPOT"): (31.03, 26.87),
}

# Table 3: v1, EB(k̂*) and EB+; tok/s (prompt and output), mean TTFT in s, mean TPOT in ms.
TABLE3: dict[tuple[str, str], dict[str, Triple]] = {
    (RTX, "c=32"): {"tok/s": (4928, 4728, 4930), "TTFT": (0.061, 0.090, 0.061), "TPOT": (19.4, 16.5, 19.5)},
    (RTX, "c=512"): {"tok/s": (8330, 13549, 13510), "TTFT": (1.2, 8.3, 5.1), "TPOT": (164.2, 77.6, 90.4)},
    (RTX, "c=2048"): {
        "tok/s": (8830, 13179, 13214),
        "TTFT": (83.8, 70.8, 68.2),
        "TPOT": (207.3, 82.7, 101.6),
    },
    (RTX, "lengths shift"): {
        "tok/s": (7025, 9647, 9582),
        "TTFT": (190.7, 157.5, 152.1),
        "TPOT": (178.5, 105.0, 102.2),
    },
    (RTX, "clients shift"): {
        "tok/s": (8364, 10350, 10250),
        "TTFT": (24.0, 29.8, 26.6),
        "TPOT": (142.4, 51.6, 77.5),
    },
    (H200, "c=32"): {"tok/s": (11584, 10779, 11586), "TTFT": (0.041, 0.062, 0.042), "TPOT": (8.2, 7.1, 8.2)},
    (H200, "c=512"): {"tok/s": (27464, 27207, 27460), "TTFT": (0.7, 4.6, 0.7), "TPOT": (52.7, 36.8, 52.7)},
    (H200, "c=2048"): {
        "tok/s": (26368, 27198, 27043),
        "TTFT": (24.4, 34.6, 33.7),
        "TPOT": (128.1, 72.8, 79.2),
    },
    (H200, "lengths shift"): {
        "tok/s": (20396, 20762, 21182),
        "TTFT": (41.2, 66.5, 69.7),
        "TPOT": (101.0, 42.3, 63.1),
    },
    (H200, "clients shift"): {
        "tok/s": (24251, 23374, 24397),
        "TTFT": (7.7, 13.7, 9.4),
        "TPOT": (77.9, 45.6, 66.8),
    },
}
# What EB+ ran in the stationary cells of Table 3 (True: exclusive batches).
CHOICES = {
    (RTX, 32): False,
    (RTX, 512): True,
    (RTX, 2048): True,
    (H200, 32): False,
    (H200, 512): False,
    (H200, 2048): True,
}
PAPER_MARGIN = 1e-5  # δ of rule (8), s/token

# Table 10: best share θ by mean output (rows) and slots N, found by a sweep; H200, 8B, prompts of one token.
TABLE10_SLOTS = (64, 128, 256, 512)
TABLE10: dict[int, tuple[float, float, float, float]] = {
    64: (0.53, 0.46, 0.40, 0.46),
    128: (0.53, 0.33, 0.33, 0.40),
    192: (0.39, 0.20, 0.13, 0.60),
    256: (0.39, 0.27, 0.27, 0.40),
    320: (0.33, 0.27, 0.33, 0.13),
    384: (0.33, 0.20, 0.13, 0.27),
}

# Table 11: tok/s by threshold k (N = 128, mean output 64) for mean prompts of 1, 32, 64 and 128 tokens.
TABLE11_PROMPTS = (1, 32, 64, 128)
TABLE11: dict[int, tuple[float, float, float, float]] = {
    8: (3036, 3366, 3331, 3047),
    16: (4223, 4276, 4273, 3867),
    24: (5091, 4949, 4554, 4278),
    32: (5266, 5413, 4776, 4421),
    40: (6094, 5652, 5356, 4427),
    48: (5943, 5801, 5494, 4578),
    56: (6627, 5735, 5460, 4701),
    64: (6368, 5990, 5522, 4580),
    72: (5830, 6059, 5553, 4825),
    80: (5986, 6103, 5342, 4701),
    88: (6337, 6001, 5488, 4637),
    96: (6330, 5892, 5338, 4563),
    104: (6150, 5751, 5242, 4460),
    112: (5874, 5461, 4998, 4241),
    120: (5543, 5184, 4906, 4300),
    128: (5626, 5313, 4995, 4315),
}

# Table 13: tok/s by fixed θ on RTX PRO 6000, 8B, 3000 requests; the last is the adaptive threshold.
TABLE13_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TABLE13: dict[str, tuple[float, ...]] = {
    "Gamma(2)": (3303, 3351, 3399, 3435, 3472, 3585, 4129, 3991, 3877, 4056),
    "ShareGPT": (6133, 6347, 6620, 6676, 7023, 7180, 6988, 6853, 6544, 7048),
}

# Appendix E.3: the best θ moves with the shape of Gamma outputs (shape: θ).
GAMMA_SHIFT = {1: 0.16, 2: 0.36}

# Table 18: share of requests in % within both targets (TTFT in s, TPOT in ms); v1, EB, EB+; RTX, 8B, c = 512.
TABLE18: dict[tuple[int, int], Triple] = {
    (2, 50): (0.6, 0.0, 0.0),
    (2, 100): (4.9, 0.0, 1.2),
    (5, 50): (0.6, 0.0, 1.1),
    (5, 100): (5.0, 6.2, 48.4),
    (10, 50): (0.6, 0.5, 1.3),
    (10, 100): (5.8, 77.3, 80.3),
}

# The fixed cost of a phase that Table 10 needs, in decode iterations, and the middle of the range
# that Table 11 gives (0.05 to 0.09), in seconds. The kernel's intercept is 0.0013 s.
PHASE_ITERATIONS = 17.6
PHASE_SECONDS_TABLE11 = 0.07
