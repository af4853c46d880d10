"""Figures 3 and 4 and tables 14 to 16 (8B) of arXiv 2606.00516."""

from __future__ import annotations

from headgate_papers.eb.published import H200, RTX

SYNTHETIC = {"decode-heavy": (128, 1024), "balanced": (512, 512), "prefill-heavy": (1024, 128)}

# Figure 3: tok/s of v1, the best fixed k and EB(k̂*), and that k; H200, N = 1024, geometric outputs.
FIGURE3 = {
    "decode-heavy": (13974, 14561, 15725, 1024),
    "balanced": (19509, 20208, 20937, 896),
    "prefill-heavy": (32228, 32669, 32863, 896),
}

# Figure 4, read off: requests/s of v0, v1 and EB(k̂*) by GPU and lengths.
FIGURE4 = {
    (RTX, "decode-heavy"): (5.6, 5.3, 6.1),
    (RTX, "balanced"): (8.4, 7.7, 9.2),
    (RTX, "prefill-heavy"): (14.0, 10.3, 14.6),
    (H200, "decode-heavy"): (15.8, 14.0, 13.8),
    (H200, "balanced"): (21.0, 20.3, 20.5),
    (H200, "prefill-heavy"): (28.0, 28.2, 28.5),
}

# Tables 14 and 15: (B, N) of the best run, then CV %, largest / smallest, B-Sens %, N-Sens % over the grid.
Sensitivity = tuple[int, int, float, float, float, float]
TABLE14: dict[tuple[str, str, str], Sensitivity] = {
    (RTX, "v0", "ShareGPT"): (14336, 1536, 4.7, 1.17, 1.3, 4.9),
    (RTX, "v0", "LongBench"): (16384, 512, 1.2, 1.05, 1.1, 0.7),
    (RTX, "v0", "WildChat"): (18432, 1024, 7.8, 1.29, 3.2, 8.3),
    (RTX, "v0", "NuminaMath"): (8192, 256, 2.3, 1.08, 0.9, 2.4),
    (RTX, "v1", "ShareGPT"): (16384, 1536, 3.3, 1.12, 0.8, 3.6),
    (RTX, "v1", "LongBench"): (10240, 1024, 1.0, 1.04, 1.1, 0.5),
    (RTX, "v1", "WildChat"): (18432, 1024, 6.5, 1.24, 4.9, 5.8),
    (RTX, "v1", "NuminaMath"): (14336, 256, 3.6, 1.11, 0.5, 3.9),
    (RTX, "EB", "ShareGPT"): (14336, 1536, 12.0, 1.40, 0.4, 13.2),
    (RTX, "EB", "LongBench"): (16384, 512, 0.8, 1.03, 0.9, 0.4),
    (RTX, "EB", "WildChat"): (10240, 1024, 8.5, 1.28, 4.5, 9.1),
    (RTX, "EB", "NuminaMath"): (4096, 256, 2.7, 1.09, 0.8, 2.9),
    (H200, "v0", "ShareGPT"): (18432, 2048, 2.9, 1.12, 2.7, 2.4),
    (H200, "v0", "LongBench"): (18432, 256, 0.9, 1.03, 0.8, 0.5),
    (H200, "v0", "WildChat"): (18432, 1536, 2.9, 1.20, 2.0, 1.9),
    (H200, "v0", "NuminaMath"): (10240, 256, 3.5, 1.11, 1.1, 3.8),
    (H200, "v1", "ShareGPT"): (10240, 1024, 3.5, 1.12, 0.9, 3.8),
    (H200, "v1", "LongBench"): (14336, 256, 0.9, 1.04, 0.9, 0.5),
    (H200, "v1", "WildChat"): (4096, 2048, 3.3, 1.16, 2.9, 2.6),
    (H200, "v1", "NuminaMath"): (14336, 256, 3.8, 1.12, 0.7, 4.2),
    (H200, "EB", "ShareGPT"): (16384, 1536, 9.3, 1.33, 0.8, 10.2),
    (H200, "EB", "LongBench"): (14336, 2048, 1.1, 1.04, 1.1, 0.6),
    (H200, "EB", "WildChat"): (16384, 1024, 3.5, 1.12, 2.0, 3.7),
    (H200, "EB", "NuminaMath"): (18432, 256, 2.5, 1.08, 0.6, 2.7),
}

# Table 16: (B, N) of the best run with synthetic lengths.
TABLE16: dict[tuple[str, str, str], tuple[int, int]] = {
    (RTX, "v1", "decode-heavy"): (4096, 256),
    (RTX, "EB", "decode-heavy"): (4096, 512),
    (RTX, "v1", "balanced"): (8192, 256),
    (RTX, "EB", "balanced"): (14336, 512),
    (RTX, "v1", "prefill-heavy"): (10240, 256),
    (RTX, "EB", "prefill-heavy"): (18432, 512),
    (H200, "v1", "decode-heavy"): (18432, 512),
    (H200, "EB", "decode-heavy"): (14336, 1536),
    (H200, "v1", "balanced"): (10240, 512),
    (H200, "EB", "balanced"): (18432, 1024),
    (H200, "v1", "prefill-heavy"): (18432, 1024),
    (H200, "EB", "prefill-heavy"): (10240, 512),
}
