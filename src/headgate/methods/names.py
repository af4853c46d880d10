"""Every policy and router by its name, in two tables one can read.

A class is imported when its name is first looked up: an engine loads the policy that it runs and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import TypeVar

from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy

Kind = TypeVar("Kind")


class Names(MutableMapping[str, type[Kind]]):
    """Names of classes, each a class or where it is: MODULE:CLASS below this folder."""

    def __init__(self, homes: dict[str, str]) -> None:
        self._classes: dict[str, str | type[Kind]] = {**homes}

    def __getitem__(self, name: str) -> type[Kind]:
        found = self._classes[name]
        if isinstance(found, str):
            module, _, kind = found.partition(":")
            found = self._classes[name] = getattr(import_module(f"headgate.methods.{module}"), kind)
        return found

    def home(self, name: str) -> str:
        """MODULE:CLASS of a name."""
        found = self._classes[name]
        return found if isinstance(found, str) else f"{found.__module__}:{found.__name__}"

    def __setitem__(self, name: str, kind: type[Kind]) -> None:
        self._classes[name] = kind

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes


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
        "look-ahead": "mixed.lookahead:LookAhead",
        "sglang": "sglang:SGLang",
        "keep": "keep.policy:Keep",
        "fairbatching": "slack:FairBatching",
        "qoserve": "slack:QoServe",
        "ppas": "mixed.paced:Ppas",
        "prefill-interval": "mixed.paced:PrefillInterval",
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
        "prioritize-and-route": "fluid.gates:PrioritizeAndRoute",
        "service-level": "fluid.gates:ServiceLevelRoute",
        "service-level-general": "fluid.gates:GeneralRoute",
        "density-first": "fluid.gates:DensityFirst",
        "density-deep": "fluid.online:DensityDeep",
        "online": "fluid.online:Online",
    }
)


def __getattr__(name: str) -> type:
    """Classes by their own names, for files that import them from here."""
    for table in (BATCH, ROUTE):
        for key in table:
            if table.home(key).rpartition(":")[2] == name:
                return table[key]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
