"""What to run: name to class, in a dictionary one can read."""

from __future__ import annotations

from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy
from headgate.methods.balance.balance import (
    Affinity,
    AtRandom,
    LeastLoaded,
    LeastPending,
    PowerOfTwo,
    RoundRobin,
)
from headgate.methods.balance.prefix import Overlap, PrefixAware, Scored
from headgate.methods.eb.adaptive import AdaptiveExclusive
from headgate.methods.eb.exclusive import Exclusive, PrefillFirst, RequestLevel
from headgate.methods.eb.hybrid import ExclusivePlus
from headgate.methods.fluid.density_deep import DensityDeep
from headgate.methods.fluid.gates import (
    BucketAndRoute,
    DensityFirst,
    FirstComeCoupled,
    FirstComePartitioned,
    GateAndRoute,
    GateAndRoutePlus,
    GateCoupled,
    GateDecoupled,
    GeneralRoute,
    PrioritizeAndRoute,
    ServiceLevelRoute,
)
from headgate.methods.fluid.online import Online
from headgate.methods.keep.policy import Keep
from headgate.methods.mixed.lookahead import LookAhead
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.mixed.sarathi import Sarathi, ShortestFirst
from headgate.methods.rad.rad import Rad
from headgate.methods.rad.two_phase import TwoPhaseRad
from headgate.methods.slai.slai import Slai
from headgate.methods.split.split import Split
from headgate.methods.wait.wait import NestedWait, Wait

__all__ = [
    "BATCH",
    "ROUTE",
    "AdaptiveExclusive",
    "Exclusive",
    "ExclusivePlus",
    "Keep",
    "LookAhead",
    "Mixed",
    "NestedWait",
    "PrefillFirst",
    "Rad",
    "RequestLevel",
    "Sarathi",
    "ShortestFirst",
    "Slai",
    "TwoPhaseRad",
    "Wait",
]

BATCH: dict[str, type[BatchPolicy]] = {
    "mixed": Mixed,
    "eb": Exclusive,
    "eb-online": AdaptiveExclusive,
    "eb+": ExclusivePlus,
    "v0": PrefillFirst,
    "request-level": RequestLevel,
    "sarathi": Sarathi,
    "sarathi-spf": ShortestFirst,
    "slai": Slai,
    "rad": Rad,
    "rad-smooth": TwoPhaseRad,
    "wait": Wait,
    "nested-wait": NestedWait,
    "look-ahead": LookAhead,
    "keep": Keep,
}

ROUTE: dict[str, type[RoutePolicy]] = {
    "round-robin": RoundRobin,
    "random": AtRandom,
    "least-loaded": LeastLoaded,
    "least-pending": LeastPending,
    "power-of-two": PowerOfTwo,
    "affinity": Affinity,
    "prefix-aware": PrefixAware,
    "overlap": Overlap,
    "llm-d": Scored,
    "split": Split,
    "gate-and-route": GateAndRoute,
    "gate-and-route+": GateAndRoutePlus,
    "token-bucket": BucketAndRoute,
    "prioritize-and-route": PrioritizeAndRoute,
    "service-level": ServiceLevelRoute,
    "service-level-general": GeneralRoute,
    "density-first": DensityFirst,
    "density-deep": DensityDeep,
    "online": Online,
    "fi-wsp": FirstComeCoupled,
    "gi-wsp": GateCoupled,
    "gf-wsp": GateDecoupled,
    "fg-sp": FirstComePartitioned,
}
