"""What planners can be told beyond the settings of a run. Each is declared once; flags derive from it."""

from __future__ import annotations

from headgate.experiment.settings import Experiment
from headgate.experiment.workers import ON, Workers
from headgate.settings_base import Count, SettingsModel, Switch, declared

COSTS, LEVELS, FLEET = "Step costs as numbers, instead of a card", "Service levels", "Fleet"
SEARCH = "Search"
MOST_SEEDS = 100  # of one search
FAIRNESS = "largest difference of"


class FleetSettings(SettingsModel):
    classes: tuple[str, ...] = declared(
        FLEET,
        "NAME:prompt=P,output=D,rate=R, and ,patience=10s or ,cached=C if known; repeated",
        (),
        flag="--class",
    )
    engines: int | None = declared(FLEET, "engines in the fleet (default: 1)")
    from_log: str | None = declared(FLEET, "classes as a router saw them: the trace file of headgate route")
    clusters: int = declared(FLEET, "classes to cut a trace into, at most", 3)
    mixed: int | None = declared(FLEET, "engines that take prompts (default: as planned)")
    solo: int | None = declared(FLEET, "engines that only decode (default: as planned)")
    prompt_price: float | None = declared(FLEET, "of a prompt token (default: 1)")
    output_price: float | None = declared(FLEET, "of an output token (default: 2)")
    separate: Switch = declared(
        FLEET, "each finished stage pays, not only finished requests", False, flag="--separate/--no-separate"
    )

    def size(self, run: Experiment) -> int:
        return (run.engines or 1) if self.engines is None else self.engines

    def prices(self, run: Experiment) -> tuple[float, float]:
        pairs = ((self.prompt_price, run.prompt_price, 1.0), (self.output_price, run.output_price, 2.0))
        prompt, output = (next(price for price in each if price is not None) for each in pairs)
        return prompt, output


class StepSettings(SettingsModel):
    chunk: int | None = declared(COSTS, "prompt tokens in a mixed step (default: 512; 256)")
    whole_chunks: Switch = declared(
        COSTS, "a prompt takes whole steps, not P/C of one", False, flag="--whole-chunks/--no-whole-chunks"
    )
    mixed_fixed: str | None = declared(COSTS, "of a step with a prompt, such as 17.4ms")
    mixed_per_token: str | None = declared(COSTS, "per prompt token in it, such as 62us")
    solo_step: str | None = declared(COSTS, "of a step without a prompt, such as 22ms")

    @property
    def costs(self) -> dict[str, str | None]:
        """The three numbers by their flags; empty when a card says."""
        costs = {"--mixed-fixed": self.mixed_fixed, "--mixed-per-token": self.mixed_per_token}
        costs["--solo-step"] = self.solo_step
        return costs if any(costs.values()) else {}


class LevelSettings(SettingsModel):
    """Service levels of `plan fluid`, except --tpot, which is a setting of every run."""

    prefill_fairness: float | None = declared(LEVELS, f"{FAIRNESS} prefill shares of two classes")
    decode_fairness: float | None = declared(LEVELS, f"{FAIRNESS} solo decodes, per engine")
    tpot_over: str = declared(LEVELS, "--tpot caps the mean over tokens or, as published, slots", "tokens")
    serve: tuple[str, ...] = declared(LEVELS, "CLASS=SHARE, at least; repeated", ())


class SearchSettings(SettingsModel):
    classes: str | None = declared(SEARCH, "classes drawn at random, such as paying=5%,free=95%")
    seeds: int = declared(SEARCH, "so many seeds, from --seed on", 4, ge=1, le=MOST_SEEDS)
    precision: float = declared(SEARCH, "of a bracket, as a share of the rate", 0.04, ge=0.001, le=0.5)
    jobs: Count | None = declared(SEARCH, "processes (default: one per core)")
    on: str = declared(SEARCH, ON, "")
    as_recorded: Switch = declared(
        SEARCH,
        "a trace's own times, faster or slower, instead of Poisson",
        False,
        flag="--as-recorded/--no-as-recorded",
    )
    most_engines: Count = declared(SEARCH, "with --find engines: look no further", 512)

    @property
    def workers(self) -> Workers:
        return Workers(self.jobs or 1, self.on).checked()
