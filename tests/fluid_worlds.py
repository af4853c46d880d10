"""The instances of the gate-and-route paper that tests share."""

from __future__ import annotations

from typing import Any

from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices

CODE, SUMMARY, EXTRACT = (300, 1000), (3000, 400), (3000, 50)
DOLLY = ((89, 915), (1177, 436), (992, 182))
QWEN_8B, QWEN_4B = (0.0174, 6.2e-5, 45.45), (0.0152, 3.6e-5, 52.63)


def instance(
    *rates: float,
    sizes: tuple[tuple[float, float], ...] = (CODE, SUMMARY),
    impatience: tuple[float, ...] | float = 0.1,
    slots: int = 16,
    model: tuple[float, float, float] = QWEN_8B,
    prices: tuple[float, float] = (0.1, 0.2),
    charging: str = "bundled",
    **pace: Any,
) -> Instance:
    """The base instance of section 6.2 with what is changed; without rates half a request per second each."""
    rates = rates or (0.5,) * len(sizes)
    patience = impatience if isinstance(impatience, tuple) else (impatience,) * len(sizes)
    flows = tuple(
        Flow(f"class{number}", prompt, output, rate, theta)
        for number, ((prompt, output), rate, theta) in enumerate(zip(sizes, rates, patience, strict=True))
    )
    fixed, per_token, speed = model
    numbers = {"mixed_fixed": fixed, "mixed_per_token": per_token, "solo_speed": speed, "chunk": 256} | pace
    return Instance(flows, EnginePace(slots=slots, **numbers), TokenPrices(*prices), charging)
