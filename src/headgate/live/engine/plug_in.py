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
from headgate.cost.likeness import Likeness, shape_of
from headgate.live.engine.events import RAISED, LiveObserver
from headgate.live.engine.live import Live
from headgate.live.engine.metrics import Metrics
from headgate.live.engine.process import LOG, SHARED, EngineNames
from headgate.live.engine.reload import Build, Reload, Renewals, Renewed
from headgate.live.engine.requests import RequestTerms, promises
from headgate.live.engine.settings import Settings, file_of
from headgate.live.engine.trace import Trace

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


class PlugIn:
    """`policy` is None where the engine decides and we only watch; it asks `renew` between two plans."""

    def __init__(self, settings: Settings, facts: EngineFacts, build: Build) -> None:
        self.settings, self._facts, self._build = settings, facts, build
        self.policy, self._parameters = self._make(settings)
        # A trace that cannot be written stops the start, as any wrong setting does.
        self._trace = self._open(settings.trace, settings, self._parameters)
        self._first_trace = self._traced = settings.trace  # the server's own, and where it is written now
        self._new_trace: Trace | None = None  # opened beside the engine, for settings that are ready
        about = {"policy": settings.policy, "card": settings.card or "none", "model": facts.model}
        self._metrics = Metrics(settings, about, facts.kv_tokens, facts.engine)
        if self._metrics.unseen:
            LOG.info(
                "headgate: metrics reach the server's /metrics when headgate is one of %s, or %s names an "
                "empty folder; or set metrics_port",
                facts.names.plug_ins,
                SHARED,
            )
        self.observers: Sequence[Observer] = (FallBackLog(facts.names.title), *self.watchers)
        self._live: Live | None = None  # not there yet while the engine starts
        self._renewals: Renewals | None = None

    @property
    def watchers(self) -> list[Metrics | Trace]:
        return [self._metrics] if self._trace is None else [self._metrics, self._trace]

    def promises(self, extra_args: Mapping[str, Any] | None) -> RequestTerms:
        return promises(extra_args, self.settings)

    def follow(self, read: Callable[[str], Settings]) -> None:
        if (path := file_of()) is not None:
            fallen = lambda: self._live is not None and self._live.fallen is not None  # noqa: E731
            self._renewals = Renewals(Reload(path, read), self.settings, self._prepare, fallen)

    def begin(self, live: Live) -> None:
        self._live = live
        self._metrics.counts = live.counts  # only the driver knows of empty steps
        self._metrics.drafts = live.drafts
        self._announce()

    def renew(self) -> Renewed | None:
        if self._renewals is None:
            return None
        ready = self._renewals.take()
        mark = self._renewals.take_mark()
        if ready is not None:
            self._renewed(ready)
        if mark is not None and self._trace is not None:
            self._trace.marked(mark, self._now)
        return ready

    def _renewed(self, ready: Renewed) -> None:
        trace = ready.settings.trace or self._first_trace
        if trace != self._traced:
            old, self._trace, self._new_trace, self._traced = self._trace, self._new_trace, None, trace
            for each, on in ((old, False), (self._trace, True)):
                if each is not None and self._live is not None:
                    self._live.news.listen(each, on)
            if old is not None:  # the engine does not wait for its end
                Thread(target=old.close, name="headgate-end-of-trace", daemon=True).start()
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
            self._live.news.tell()
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
        path = settings.trace or self._first_trace
        self._new_trace = self._open(path if path != self._traced else None, settings, parameters)
        return policy, parameters

    def _open(self, path: str | None, settings: Settings, parameters: Mapping[str, Any]) -> Trace | None:
        if path is None:
            return None
        facts = self._facts
        header = {
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
        trace = Trace(path, header)
        LOG.info("headgate: trace in %s", trace.path)
        return trace

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


def admit(problem: str | None, doubt: str | None, force: bool) -> None:
    """An engine with a problem only by force; what is done all the same is said."""
    if problem and not force:
        raise InputError(problem)
    if problem:
        LOG.warning("headgate: forced, although %s", problem)
    elif doubt:
        LOG.warning("headgate: %s; all that headgate relies on is there, so it runs", doubt)


def likeness(model: Any, ranks: int, ahead: Any, ask: Callable[[], str], version: str = "") -> Likeness:
    """What engine this is, for cards. `model`: its configuration; `ask`: for the name of the GPU."""
    settings = {
        "tensor parallel": str(ranks),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype).removeprefix("torch."),
        "asynchronous scheduling": str(bool(ahead)),
    }
    try:
        gpu = ask()
    except Exception:  # a platform that cannot say what it is
        gpu = ""
    return Likeness(shape_of(model.hf_text_config), version, gpu, settings)


class FallBackLog(LiveObserver):
    def __init__(self, title: str) -> None:
        self._title = title

    def fell_back(self, reason: str, now: float, cause: str = RAISED) -> None:
        LOG.error("headgate: FALLEN BACK to %s's own scheduling after %.1f s: %s", self._title, now, reason)
