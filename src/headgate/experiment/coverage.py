"""How much of a run lies outside what its cost card was measured on."""

from __future__ import annotations

from headgate.cost.card import Region
from headgate.record.tables import Run

WORTH_SAYING = 0.05  # share of the time in steps


def outside(run: Run, region: Region) -> dict[str, float]:
    """For each feature of a step, the share of the time in steps in which it lay outside; only where > 0."""
    steps = run.steps
    total = float(steps["seconds"].sum())
    found: dict[str, float] = {}
    for name in ("decodes", "context", "prefill"):
        low, high = getattr(region, name)
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
    told = ", ".join(f"{name} in {100 * share:.0f} % of the step time" for name, share in much.items())
    return f"{run.meta['label']}: outside what card {run.meta['card']} measured: {told}; extrapolated there"
