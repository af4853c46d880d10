"""What the gate-and-route paper prints (arXiv 2602.02987): instances, marked optima, axes and tables."""

from __future__ import annotations

from headgate.methods.fluid.flows import BUNDLED, EnginePace, Flow, Instance, TokenPrices

SOURCE = "gate-and-route, arXiv 2602.02987"
QWEN_8B = (0.0174, 6.2e-5, 45.45)  # α, β, γ
CHUNK, THETA, PRICES = 256, 0.1, TokenPrices(0.1, 0.2)
CODE, SUMMARY = (300.0, 1000.0), (3000.0, 400.0)  # prompt and output of the two classes
SIZES = (5, 20, 50, 200, 500)
STATED_SLOTS, LIKELY_SLOTS = 16, 8  # the text says 16; Figs 2, 8, 9 and 10 fit 8

FIG2 = {"bundled": 300.2, "separate": 452.9}  # the marked optima
FIG2_EDGE = 1.2  # where the axis of arrivals ends
FIG4_AXIS = (180.0, 320.0)
FIG7_AXIS = (0.60, 1.00)
FIG7_RANGES = {
    "mixed_fixed": (0.015, 0.02),  # printed as 0.15 to 0.02
    "mixed_per_token": (1e-5, 1e-3),
    "solo_speed": (10.0, 50.0),
    "tokens": (200.0, 3000.0),
    "rate": (0.25, 0.5),
}
FIG8_AXES = {"prefill_fairness": (0.0, 0.3), "decode_fairness": (0.0, 1.0), "tpot": (0.02, 0.024)}
FIG8_LEAST_TPOT = 0.022  # where its curve becomes vertical
FIG9_AXES = {
    "slots": (1, 35),
    "mixed_fixed": (0.0, 0.1),
    "mixed_per_token": (0.0, 0.001),
    "solo_speed": (0.0, 50.0),
}
FIG9_ALPHA_REVENUE = (180.0, 220.0)  # the axis of the α panel
FIG9_SATURATES = 16  # slots
FIG10_SCALES = {"slots and beta": (50.0, 300.0), "prices": (100.0, 500.0)}
FIG10_PRICES = (0.05, 0.30)

DOLLY = {  # category: mean prompt, mean output, samples, KL divergence of outputs to an exponential
    "brainstorming": (61, 331, 1764, 0.0652),
    "classification": (123, 142, 2136, 0.1491),
    "closed QA": (992, 182, 1738, 0.1245),
    "creative writing": (89, 915, 699, 0.1595),
    "general QA": (69, 572, 2187, 0.1309),
    "extraction": (1139, 273, 1462, 0.2631),
    "open QA": (45, 293, 3739, 0.0584),
    "summarization": (1177, 436, 1150, 0.1255),
}


def two_classes(
    rate: float = 0.5, slots: int = STATED_SLOTS, charging: str = BUNDLED, prices: TokenPrices = PRICES
) -> Instance:
    """The instance of section 6.2 at so many arrivals per second, engine and class."""
    flows = (Flow("code", *CODE, rate, THETA), Flow("summary", *SUMMARY, rate, THETA))
    return Instance(flows, pace(slots), prices, charging)


def pace(slots: int) -> EnginePace:
    """Qwen-8B on an A100."""
    return EnginePace(slots, CHUNK, *QWEN_8B)
