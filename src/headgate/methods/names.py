"""Every policy and router by its name, in two tables one can read.

A class is imported when its name is first looked up: an engine loads the policy that it runs and no other.
"""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import Any, Generic, TypeVar

from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy

Kind = TypeVar("Kind")


class Names(UserDict[str, Any], Generic[Kind]):
    """Names of classes, each a class or where it is: MODULE:CLASS below this folder."""

    def __getitem__(self, name: str) -> type[Kind]:
        home = self.data[name]
        if isinstance(home, str):
            module, _, kind = home.partition(":")
            self.data[name] = getattr(import_module(f"headgate.methods.{module}"), kind)
        found: type[Kind] = self.data[name]
        return found


BATCH: Names[BatchPolicy] = Names(
    {
        "mixed": "mixed.mixed:Mixed",
        "eb": "eb.exclusive:Exclusive",
        "eb-online": "eb.adaptive:AdaptiveExclusive",
        "eb+": "eb.hybrid:ExclusivePlus",
        "v0": "eb.exclusive:PrefillFirst",
        "request-level": "eb.exclusive:RequestLevel",
        "sarathi": "mixed.sarathi:Sarathi",
        "sarathi-spf": "mixed.sarathi:ShortestFirst",
        "slai": "slai:Slai",
        "rad": "rad:Rad",
        "rad-smooth": "rad:TwoPhaseRad",
        "wait": "wait.wait:Wait",
        "nested-wait": "wait.wait:NestedWait",
        "sglang": "sglang:SGLang",
        "keep": "keep.policy:Keep",
        "fairbatching": "slack:FairBatching",
        "qoserve": "slack:QoServe",
        "ppas": "mixed.sarathi:Ppas",
        "prefill-interval": "mixed.sarathi:PrefillInterval",
    }
)

ROUTE: Names[RoutePolicy] = Names(
    {
        "round-robin": "balance.balance:RoundRobin",
        "random": "balance.balance:AtRandom",
        "least-loaded": "balance.balance:LeastLoaded",
        "least-pending": "balance.balance:LeastPending",
        "power-of-two": "balance.balance:PowerOfTwo",
        "affinity": "balance.balance:Affinity",
        "prefix-aware": "balance.prefix:PrefixAware",
        "overlap": "balance.prefix:Overlap",
        "llm-d": "balance.prefix:Scored",
        "split": "split.split:Split",
        "gate-and-route": "fluid.gates:GateAndRoute",
        "gate-and-route+": "fluid.gates:GateAndRoutePlus",
        "token-bucket": "fluid.gates:BucketAndRoute",
        "service-level": "fluid.gates:ServiceLevelRoute",
        "service-level-general": "fluid.gates:GeneralRoute",
        "density-first": "fluid.gates:DensityFirst",
        "density-deep": "fluid.online:DensityDeep",
        "online": "fluid.online:Online",
    }
)

PAPERS = {"eb-paper", "eb-paper+", "look-ahead", "prioritize-and-route"}  # of headgate-papers
PAPERS |= {"fi-wsp", "gi-wsp", "gf-wsp", "fg-sp"}
