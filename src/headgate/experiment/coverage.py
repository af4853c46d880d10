"""How much of a run lies outside what its cost card was measured on."""

from __future__ import annotations

from headgate.cost.card import Card
from headgate.record.tables import Run

WORTH_SAYING = 0.05  # share of the time in steps
WORDS = {"behind": "prompt tokens already computed"}  # where a feature's name says too little


def outside(run: Run, card: Card) -> dict[str, float]:
    """For each feature of a step, the share of the time in steps in which it lay outside; only where > 0.

    Where a card does not say how many tokens stood before the chunks it timed, they cannot have been more
    than its longest request; the simulator prices more by the product of chunk and start (`per_attention`).
    """
    steps = run.steps
    region = {name: getattr(card.region, name) for name in ("decodes", "context", "prefill")}
    region["behind"] = card.region.behind or (0, card.max_model_len)
    total = float(steps["seconds"].sum())
    found: dict[str, float] = {}
    for name, (low, high) in region.items():
        values = steps[name]
        if name == "context":  # it grows along the row; its middle stands for the row
            values = values + steps["decodes"] * (steps["count"] - 1) // 2
        missed = (values > 0) & ((values < low) | (values > high))
        share = float(steps["seconds"][missed].sum()) / total if total else 0.0
        if share > 0:
            found[name] = round(share, 4)
    return found


def warning(run: Run) -> str | None:
    """One line for the user when a good part of the run is extrapolation."""
    shares: dict[str, float] = run.meta.get("outside_card", {})
    much = {name: share for name, share in shares.items() if share > WORTH_SAYING}
    if not much:
        return None
    told = ", ".join(
        f"{WORDS.get(name, name)} in {100 * share:.0f} % of the step time" for name, share in much.items()
    )
    return f"{run.meta['label']}: outside what card {run.meta['card']} measured: {told}; extrapolated there"
