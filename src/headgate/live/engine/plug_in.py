"""What a plug-in does in any engine: makes the policy, lets observers listen, takes changed settings over."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from threading import Thread
from typing import Any, NamedTuple

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy, Observer
from headgate.core.request import Slo
from headgate.core.version import VERSION
from headgate.live.engine.events import RAISED, LiveObserver
from headgate.live.engine.live import Live
from headgate.live.engine.metrics import Metrics
from headgate.live.engine.process import LOG, SHARED, EngineNames
from headgate.live.engine.reload import Build, Reload, Renewals, Renewed
from headgate.live.engine.requests import RequestTerms, promises
from headgate.live.engine.settings import Settings, file_of
from headgate.live.engine.trace import Trace

Watcher = Metrics | Trace
# Of the engine's request: class, promises, predicted output, tenant.
Promises = Callable[[Any], tuple[str, Slo, int | None, str]]


class EngineFacts(NamedTuple):
    names: EngineNames
    version: str
    model: str
    kv_tokens: int
    limits: Mapping[str, int]  # as the engine names them
    engine: int = 0  # which of several engines side by side
    asynchronous: bool = False  # it composes the next step while one runs
    priorities: bool = False  # it orders requests by priority
    lockstep: int = 1  # engines side by side that begin each step together, this one among them


class Duties(NamedTuple):
    policy: BatchPolicy | None  # None: the engine decides, we only watch
    observers: tuple[Observer, ...]
    watchdog: float
    promises: Promises
    renew: Callable[[], Renewed | None]  # asked between two plans


class PlugIn:
    def __init__(self, settings: Settings, facts: EngineFacts, build: Build) -> None:
        self.settings, self._facts, self._build = settings, facts, build
        self._policy, self._parameters = self._make(settings)
        self.watchers = observers(settings, self._parameters, facts)
        self._first_trace = self._traced = settings.trace  # the server's own, and where it is written now
        self._new_trace: Trace | None = None  # opened beside the engine, for settings that are ready
        self._live: Live | None = None  # not there yet while the engine starts
        self._renewals: Renewals | None = None

    def duties(self, promises: Promises) -> Duties:
        listening = FallBackLog(self._facts.names.title), *self.watchers
        return Duties(self._policy, listening, self.settings.watchdog, promises, self.renew)

    def promises(self, extra_args: Mapping[str, Any] | None) -> RequestTerms:
        return promises(extra_args, self.settings)

    def follow(self, read: Callable[[str], Settings]) -> None:
        if (path := file_of()) is not None:
            self._renewals = Renewals(Reload(path, read), self.settings, self._prepare, self._fallen)

    def begin(self, live: Live) -> None:
        self._live = live
        for watcher in self.watchers:
            if isinstance(watcher, Metrics):
                watcher.counts = live.counts  # only the driver knows of empty steps
                watcher.drafts = live.drafts
        self._announce()

    def renew(self) -> Renewed | None:
        if self._renewals is None:
            return None
        ready = self._renewals.take()
        mark = self._renewals.take_mark()
        if ready is not None:
            self._renewed(ready)
        for watcher in self.watchers:
            if mark is not None and isinstance(watcher, Trace):
                watcher.marked(mark, self._now)
        return ready

    def _renewed(self, ready: Renewed) -> None:
        trace = ready.settings.trace or self._first_trace
        if trace != self._traced:
            self._traced = trace
            self._trace_elsewhere()
        self.settings, self._parameters = ready.settings, ready.parameters
        LOG.warning("headgate: settings read again from %s", file_of())
        for watcher in self.watchers:
            watcher.renewed(ready.settings.policy, ready.parameters, self._now)
        self._announce()

    @property
    def _now(self) -> float:
        return self._live.now if self._live is not None else 0.0

    def close(self) -> None:
        if self._live is not None:
            self._live.tell()
        for watcher in self.watchers:
            watcher.close()
        if self._renewals is not None:
            self._renewals.close()

    def _make(self, settings: Settings) -> tuple[BatchPolicy | None, dict[str, Any]]:
        if settings.policy == self._facts.names.name:
            return None, {}
        promise = settings.gaps_promised()
        if self._facts.lockstep > 1 and promise and not settings.lockstep:
            raise InputError(
                f"{promise}: {self._facts.lockstep} data-parallel ranks of a model with experts step "
                "together, so prompts of any rank lengthen the gaps of all, and no rank can keep a promised "
                "gap alone; drop it, or set lockstep"
            )
        return self._build(settings)

    def _prepare(self, settings: Settings) -> tuple[BatchPolicy | None, dict[str, Any]]:
        policy, parameters = self._make(settings)
        unused, self._new_trace = self._new_trace, None
        if unused is not None:
            unused.close()
        trace = settings.trace or self._first_trace
        if trace is not None and trace != self._traced:
            self._new_trace = Trace(trace, header(settings, parameters, self._facts))
            LOG.info("headgate: trace in %s", self._new_trace.path)
        return policy, parameters

    def _trace_elsewhere(self) -> None:
        """The engine does not wait for the end of the old trace."""
        new, self._new_trace = self._new_trace, None
        old = [watcher for watcher in self.watchers if isinstance(watcher, Trace)]
        kept = [watcher for watcher in self.watchers if not isinstance(watcher, Trace)]
        self.watchers = [*kept, new] if new is not None else kept
        for trace in old:
            if self._live is not None:
                self._live.listen(trace, False)
            Thread(target=trace.close, name="headgate-end-of-trace", daemon=True).start()
        if new is not None and self._live is not None:
            self._live.listen(new, True)

    def _fallen(self) -> bool:
        return self._live is not None and self._live.fallen is not None

    def _announce(self) -> None:
        settings, facts = self.settings, self._facts
        LOG.info(
            "headgate: policy %s(%s), card %s, %s scheduling, %d slots, %d tokens a step, %d KV tokens",
            settings.policy,
            ", ".join(f"{name}={value}" for name, value in self._parameters.items()),
            settings.card or ("none, step times are learned" if settings.learns() else "none"),
            "asynchronous" if facts.asynchronous else "synchronous",
            facts.limits[facts.names.slots],
            facts.limits[facts.names.budget],
            facts.kv_tokens,
        )
        if facts.lockstep > 1:
            LOG.warning(
                "headgate: %d data-parallel ranks step together: each policy plans its own rank, and the "
                "longest step of any is the step of all",
                facts.lockstep,
            )
        if facts.priorities and (warning := settings.priorities_said(facts.names.priorities)):
            LOG.warning("headgate: %s", warning)


class FallBackLog(LiveObserver):
    def __init__(self, title: str) -> None:
        self._title = title

    def fell_back(self, reason: str, now: float, cause: str = RAISED) -> None:
        LOG.error("headgate: FALLEN BACK to %s's own scheduling after %.1f s: %s", self._title, now, reason)


def observers(settings: Settings, parameters: Mapping[str, Any], facts: EngineFacts) -> Sequence[Watcher]:
    """A trace that cannot be written stops the start, as any wrong setting does."""
    trace = []
    if settings.trace:
        trace.append(Trace(settings.trace, header(settings, parameters, facts)))
        LOG.info("headgate: trace in %s", trace[0].path)
    about = {"policy": settings.policy, "card": settings.card or "none", "model": facts.model}
    metrics = Metrics(settings, about, facts.kv_tokens, facts.engine)
    if metrics.unseen:
        LOG.info(
            "headgate: metrics reach the server's /metrics when headgate is one of %s, or %s names an empty "
            "folder; or set metrics_port",
            facts.names.plug_ins,
            SHARED,
        )
    return metrics, *trace


def header(settings: Settings, parameters: Mapping[str, Any], facts: EngineFacts) -> dict[str, Any]:
    return {
        "headgate": VERSION,
        "driver": facts.names.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "policy": settings.policy,
        "parameters": dict(parameters),
        "card": settings.card,
        "model": facts.model,
        "engine": dict(facts.limits),
        "replica": facts.engine,
        "kv_tokens": facts.kv_tokens,
        "versions": {"python": platform.python_version(), facts.names.name: facts.version},
        **({"lockstep": facts.lockstep} if facts.lockstep > 1 else {}),
    }
