"""`headgate_engines_needed` of a live fleet, for KEDA or Kubernetes' autoscaler to follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import model_validator

from headgate.cost.card import hub_name, load_card
from headgate.methods.scaling import PLAN, Decision, EnginesNeeded, Scaling, Seen, read_scaling, work_of
from headgate.settings_base import Count, Port, SettingsModel, declared
from headgate.sim.engine.engine import engine_of_card

GAUGE = "engines_needed"
ANY = "any"
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class PoolScaling:
    def __init__(
        self,
        scaling: Scaling,
        card: str,
        slots: int | None,
        budget: int | None,
        model: str | None,
        pools: Mapping[str, int],
    ) -> None:
        """`pools`: their engines now; those called prefill and decode get that part of the work."""
        known = load_card(card)
        engine = engine_of_card(known, slots and min(slots, known.max_running), budget)
        limits = engine.cost, engine.running, engine.batch_tokens, engine.kv_tokens
        self.model = model or hub_name(known.model) or known.model
        self.every, self._looked = scaling.every, float("-inf")
        self.pools = {
            pool: EnginesNeeded(scaling, work_of(*limits, pool), engines) for pool, engines in pools.items()
        }

    def due(self, now: float) -> bool:
        return now - self._looked >= self.every

    def look(self, now: float, seen: Seen, waiting: float, running: float) -> None:
        self._looked = now
        for needed in self.pools.values():
            needed.decide(now, seen, waiting, running)

    def decisions(self) -> dict[str, Decision]:
        return {pool: needed.last for pool, needed in self.pools.items()}

    def text(self) -> str:
        model = self.model.translate(ESCAPES)
        rows = (
            f'headgate_{GAUGE}{{model="{model}",pool="{pool}"}} {made.engines}\n'
            for pool, made in self.decisions().items()
        )
        return "".join((f"# TYPE headgate_{GAUGE} gauge\n", *rows))


# -- `headgate watch`

FLEET, SERVER = "Fleet", "Server"


class WatchOptions(SettingsModel):
    engine: tuple[str, ...] = declared(FLEET, "URL of an engine, whose /metrics is read; repeat it", ())
    prometheus: str | None = declared(FLEET, "URL of a Prometheus that scrapes the engines, instead")
    select: str = declared(
        FLEET, "with --prometheus: labels of the engines' metrics, such as 'model_name=\"m\"'", ""
    )
    card: str = declared(FLEET, "cost card of the engines", "cal-h200-qwen3-8b")
    slots: Count | None = declared(FLEET, "requests at once of an engine (default: 256)")
    budget: Count | None = declared(FLEET, "tokens in one step of an engine (default: 8192)")
    model: str | None = declared(FLEET, "label of the gauge (default: the card's model)")
    autoscale: str = declared(FLEET, "the rule, as for `headgate simulate` (default: plan)", PLAN)
    host: str = declared(SERVER, "address to listen on", "127.0.0.1")
    port: Port = declared(SERVER, "port of /metrics; 0: any free one", 9301)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.engine) == bool(self.prometheus):
            raise ValueError("give --engine URL, repeated, or --prometheus URL, and not both")
        for url in (*self.engine, self.prometheus or "http://"):
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url} is no URL; write http://HOST:PORT")
        return self

    def scaling(self, engines: int) -> PoolScaling:
        rule = read_scaling(self.autoscale)
        return PoolScaling(rule, self.card, self.slots, self.budget, self.model, {ANY: engines})
