"""Chat kept and batch tokens by policy and rate: `python -m studies.promises.beside`, with docs/tenants.svg.

Azure conversations (500 ms, 100 ms) beside 192 clients of batch, 2,000 tokens in, 256 out, simulated on the
calibrated H200 card with 512 slots. The same as `headgate plan capacity --find batch` at each rate.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headgate.advisor.capacity.beside import BesidePlan, plan_beside
from headgate.advisor.capacity.plan import choose
from headgate.advisor.capacity.traffic import parse_levels
from headgate.advisor.set_up import Asked
from headgate.advisor.settings import SearchSettings
from headgate.cli.output import bar
from headgate.cost.card import load_card
from headgate.experiment.build import make_engine
from headgate.experiment.settings import experiment
from studies.cards.plots import Panel, Point, Series, single, svg

HERE = Path(__file__).parent
FILE, PLOT = HERE / "results" / "beside.jsonl", HERE.parent.parent / "docs" / "tenants.svg"
RATES = (8.0, 12.0, 16.0)
BATCH = {"name": "batch", "clients": 192, "prompt": 2000, "output": 256, "background": True, "priority": 1}
NAMES = {
    "mixed": "vLLM's default",
    "sarathi:order=priority,budget=2560": "vLLM's priority, best budget",
    "slai:order=priority": "slai:order=priority",
    "keep": "keep",
}


def plan(rate: float, requests: int, seeds: int, jobs: int) -> BesidePlan:
    """One rate under every policy."""
    words = experiment(
        {
            "trace": "azure-conv",
            "rate": rate,
            "requests": requests,
            "slots": 512,
            "graph": 4096,
            "classes": [BATCH],
        }
    )
    chosen, _ = choose(list(NAMES), words, make_engine(words, load_card(words.card)))
    levels = parse_levels(["ttft=500ms@p95,tbt=100ms@p99"])
    return plan_beside(words, chosen, Asked(levels, SearchSettings(seeds=seeds, jobs=jobs), bar))


def draw(lines: list[dict[str, object]]) -> str:
    """Kept promises and tokens against the rate of chat, and the bound."""
    kept: dict[str, list[Point]] = {name: [] for name in NAMES.values()}
    tokens: dict[str, list[Point]] = {name: [] for name in (*NAMES.values(), "no policy exceeds")}
    for line in lines:
        rate, policies = float(str(line["rate"])), line["policies"]
        bound = line["bound"]
        assert isinstance(policies, list) and isinstance(bound, dict)
        for each in policies:
            name = NAMES[each["policy"]]
            kept[name].append(single(rate, 100 * each["kept"]))
            tokens[name].append(single(rate, each["tokens"]["value"] / 1000))
        tokens["no policy exceeds"].append(single(rate, bound["tokens_per_second"] / 1000))
    x = "chat, requests/s"
    panels = [
        Panel(
            x,
            "chat with every promise kept, %",
            tuple(Series(name, tuple(own)) for name, own in kept.items()),
        ),
        Panel(x, "batch, thousand tokens/s", tuple(Series(name, tuple(own)) for name, own in tokens.items())),
    ]
    return svg("Batch beside chat on one simulated H200", panels)


def main() -> None:
    """Run, write the lines, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=900, help="of chat, in a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    lines = [plan(rate, asked.requests, asked.seeds, asked.jobs).as_dict() for rate in RATES]
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    PLOT.write_text(draw(lines), encoding="utf-8")
    for line in lines:
        print(f"{line['rate']:g} chat/s, bound {line['bound']['tokens_per_second']:,.0f} tokens/s of batch")
        for each in line["policies"]:
            shown = f"{100 * each['kept']:.1f} % kept, {each['tokens']['value']:,.0f} tokens/s"
            print(f"  {each['policy']}: {shown}, {each['missed'] or 'every level'}")


if __name__ == "__main__":
    main()
