"""A router's snapshot: engines, classes, tenants, the plan beside what happens, and what went wrong last.

While no viewer is there, requests that fail or name a tenant are counted, and one sample of the counters is
kept every five seconds. All else is computed when it is asked for.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from headgate.live.route.engines import Upstream
from headgate.live.route.observe import clean, told_apart
from headgate.live.route.request import RefusedError
from headgate.live.route.view import counters
from headgate.live.route.view.counters import (
    MOST,
    Change,
    Counts,
    Labels,
    LiveView,
    Quantiles,
    Row,
    reasons,
    rounded,
    share,
)

if TYPE_CHECKING:
    from headgate.live.route.deliver.legs import RoutedRequest
    from headgate.live.route.server import RouterApp

MOST_ERRORS, MOST_REFUSALS, MOST_CHANGES = 20, 8, 20
ERRORS = ("failed", "passed-on", "client-stalled")
SEEN = ("requests", "refused", "first_token", "promises", "output_tokens", "faults", "retries")
TTFT, REFUSED = "headgate_first_token_seconds", "headgate_refused_total"


class RouterView(LiveView):
    """What is shown of one router. `ended` and `refused` are told of requests."""

    def __init__(self, app: RouterApp) -> None:
        super().__init__("router")
        self._app = app
        self.errors: deque[Row] = deque(maxlen=MOST_ERRORS)
        self.refusals: deque[Row] = deque(maxlen=MOST_REFUSALS)  # apart: an overload must not hide errors
        self.changes: deque[Row] = deque(maxlen=MOST_CHANGES)  # of engines' states
        self._why: Counter[tuple[str, str]] = Counter()  # refusals by class and reason
        self._tenants: Counter[Labels] = Counter()  # by tenant: how requests ended, why, tokens
        self._names: set[str] = set()  # of tenants
        self._states: dict[int, str] = {}

    # -- what is noted while it runs

    def ended(self, job: RoutedRequest, kept: bool | None) -> None:
        """`kept`: whether its promise was, None where nothing was promised."""
        kind, how, fault = job.kind.name, job.outcome, job.fault
        if job.tenant:
            tenant = told_apart(job.tenant, self._names)
            self._count(tenant, how)
            if job.output:
                self._count(tenant, "tokens", job.prompt + job.output)
            if kept is not None:
                self._count(tenant, "kept" if kept else "broken")
        if how == "refused":
            self._why[kind, fault] += 1
            if job.tenant:
                self._count(tenant, f"why {fault}")
            self.refusals.append(_error(job.id, job.status, how, fault, kind, job.tenant))
        elif how in ERRORS:
            self.errors.append(_error(job.id, job.status, how, fault, kind, job.tenant, job.engine))

    def refused(self, id: str, refused: RefusedError) -> None:
        """One that was refused before it had a class: a wrong key, path or body, a tenant's limit."""
        if refused.tenant:
            tenant = told_apart(refused.tenant, self._names)
            self._count(tenant, "refused")
            self._count(tenant, f"why {refused.reason}")
        self.refusals.append(_error(id, refused.status, "refused", refused.reason, "", refused.tenant))

    def _count(self, tenant: str, how: str, many: int = 1) -> None:
        self._tenants[_key(tenant, how)] += many

    def _counts(self) -> Counts:
        self._note_states()
        metrics, engines = self._app.metrics, self._app.upstreams.values()
        counts = counters.collected(each for name in SEEN for each in getattr(metrics, name).collect())
        counts["why"] = {(("class", kind), ("reason", why)): n for (kind, why), n in self._why.items()}
        counts["tenants"] = dict(self._tenants)
        counts["generated"] = {(("engine", str(each.id)),): each.load.generated for each in engines}
        return counts

    def _note_states(self) -> None:
        now = self._app.now()
        for upstream in self._app.upstreams.values():
            before, state = self._states.get(upstream.id), upstream.status(now)
            if before is not None and before != state:
                about = {"time": round(time.time(), 3), "engine": upstream.id, "from": before, "to": state}
                self.changes.append(about)
            self._states[upstream.id] = state

    def _point(self, change: Change) -> list[float | None]:
        ended, roster = change.of("headgate_requests_total", "outcome"), self._app.gate.roster
        rates = _rates(ended, change.seconds)
        up = [each.load.kv_usage for each in self._app.upstreams.values() if each.healthy]
        return [
            rates["served"],
            change.rate(REFUSED),
            rates["failed"],
            change.rate("generated"),
            len(roster.places),
            len(roster.waiting),
            change.quantiles(TTFT).get("", Quantiles()).p95,
            sum(up) / len(up) if up else None,
        ]

    # -- what is shown

    def _shown(self, short: Change, long: Change) -> Row:
        plan, (tenants, left_out) = self._plan(), _tenants(short, long)
        return {
            "name": self._app.config.router.name,
            "notes": self._notes(),
            "totals": self._totals(short, long),
            "engines": self._engines(short, long),
            "classes": self._classes(short, long, plan),
            "tenants": tenants,
            "left_out": {"tenants": left_out},
            "refused": reasons(long.of(REFUSED, "reason")),
            "plan": plan and {name: value for name, value in plan.items() if name != "classes"},
            "errors": sorted((*self.errors, *self.refusals), key=lambda each: each["time"])[::-1],
            "changes": list(self.changes)[::-1],
        }

    def _notes(self) -> list[str]:
        app, notes = self._app, []
        if app.draining:
            notes.append("the router drains and will end")
        if app.replaced:
            notes.append("another process serves in place of this one, which ends with its connections")
        if app.replicas is not None and not app.replicas.up:
            notes.append("the store is lost: slots and limits stay shared as they were")
        if app.gate.fallen is not None:
            notes.append(f"router {app.config.router.name} failed, least-loaded decides: {app.gate.fallen}")
        if not any(each.up(app.now()) for each in app.upstreams.values()):
            notes.append("no engine is up")
        return [clean(note) for note in notes]

    def _totals(self, short: Change, long: Change) -> Row:
        app, ended = self._app, short.of("headgate_requests_total", "outcome")
        ttft = long.quantiles(TTFT).get("", Quantiles())
        return {
            **_rates(ended, short.seconds),
            "refused": rounded(short.rate(REFUSED)),
            "retried": rounded(short.rate("headgate_retries_total")),
            "output": rounded(short.rate("generated"), 1),
            "running": len(app.gate.roster.places),
            "waiting": len(app.gate.roster.waiting),
            "inflight": app.front.inflight,
            "ttft_p50": rounded(ttft.p50),
            "ttft_p95": rounded(ttft.p95),
            "kept": counters.kept_share(long),
        }

    def _engines(self, short: Change, long: Change) -> list[Row]:
        """Those in trouble first where not all are sent."""
        upstreams = [each for each in self._app.upstreams.values() if not each.retired or each.legs]
        if len(upstreams) > MOST["engines"]:
            upstreams.sort(key=lambda each: self._states.get(each.id) == "up")
        rates = {id: n / (short.seconds or 1.0) for id, n in short.of("generated", "engine").items()}
        return [self._engine(each, rates, long) for each in upstreams]

    def _engine(self, upstream: Upstream, rates: dict[str, float], long: Change) -> Row:
        now, load, id = self._app.now(), upstream.load, str(upstream.id)
        member, reopens = self._app.gate.roster.replicas[upstream.id], upstream.breaker.reopens_at
        leases = self._app.replicas
        return {
            "id": upstream.id,
            "url": clean(upstream.url),
            "status": upstream.status(now),
            "role": member.role,
            "draining": upstream.draining,
            "slots": upstream.spec.slots,
            "ours": member.prompts + member.decodes,
            **({} if leases is None else {"lease": leases.held(upstream), "peers": upstream.peers}),
            "running": load.running if upstream.healthy else None,
            "waiting": load.waiting if upstream.healthy else None,
            "kv": rounded(load.kv_usage) if upstream.healthy else None,
            "output": rounded(rates.get(id, 0.0), 1),
            "ttft": rounded(upstream.first_token) if upstream.first_token else None,
            "breaker": upstream.breaker.state.value,
            "retry_s": None if reopens is None else rounded(max(reopens - now, 0.0), 1),
            "faults": reasons(long.of("headgate_leg_faults_total", "fault", engine=id)),
        }

    def _classes(self, short: Change, long: Change, plan: Row | None) -> list[Row]:
        kept, output = counters.kept_by_class(long), short.of("headgate_output_tokens_total", "class")
        ttft, rows = long.quantiles(TTFT, "class"), []
        for name, queue in self._app.gate.roster.queues.items():
            only, settings = {"class": name}, self._app.classes.by_name.get(name)
            rows.append(
                {
                    "name": clean(name),
                    "waiting": len(queue),
                    **_rates(short.of("headgate_requests_total", "outcome", **only), short.seconds),
                    "output": rounded(output.get(name, 0.0) / (short.seconds or 1.0), 1),
                    "ttft_p50": rounded(ttft.get(name, Quantiles()).p50),
                    "ttft_p95": rounded(ttft.get(name, Quantiles()).p95),
                    "promise": None if settings is None else settings.ttft,
                    "kept": kept.get(name, {}),
                    "why": reasons(long.of("why", "reason", **only)),
                    "plan": None if plan is None else plan["classes"].get(name),
                }
            )
        return sorted(rows, key=lambda row: -row["requests"]) if len(rows) > MOST["classes"] else rows

    def _plan(self) -> Row | None:
        """The newest: the rates it expects and serves, and what one more request of a class is worth."""
        plan = self._app.policy.described(self._app.gate.seconds)
        if plan is None or self._app.gate.fallen is not None:
            return None
        return {
            "age_s": plan["age_s"],
            "revenue": rounded(plan["revenue"], 1),
            "failed": plan["failed"],
            "classes": {
                name: {key: rounded(flow[key], 4) for key in ("rate", "served", "worth")}
                for name, flow in plan["classes"].items()
            },
        }


def _error(
    id: str, status: int, outcome: str, fault: str, kind: str, tenant: str, engine: int | None = None
) -> Row:
    about = {"time": round(time.time(), 3), "id": clean(id), "status": status, "outcome": outcome}
    return {**about, "fault": clean(fault), "class": clean(kind), "tenant": clean(tenant), "engine": engine}


def _rates(ended: dict[str, float], seconds: float) -> Row:
    """Requests a second, from counts by outcome."""
    hows = {"served": ("ok",), "refused": ("refused",), "failed": ERRORS, "gone": ("client-gone",)}
    rates = {name: sum(ended.get(how, 0.0) for how in hows[name]) / (seconds or 1.0) for name in hows}
    return {name: rounded(rate) for name, rate in (("requests", sum(rates.values())), *rates.items())}


def _key(tenant: str, how: str) -> Labels:
    return ("tenant", tenant), ("how", how)


def _tenants(short: Change, long: Change) -> tuple[list[Row], int]:
    """Those with most tokens and refusals, and how many others there are."""
    counted: dict[str, dict[str, float]] = {}
    before = long.before["tenants"]
    for key, n in long.now["tenants"].items():
        if gained := n - before.get(key, 0.0):
            counted.setdefault(key[0][1], {})[key[1][1]] = gained
    weight = {name: hows.get("tokens", 0.0) + hows.get("refused", 0.0) for name, hows in counted.items()}
    busiest = sorted(counted, key=lambda name: -weight[name])

    def tokens(name: str) -> float:
        now, then = (counts["tenants"].get(_key(name, "tokens"), 0.0) for counts in (short.now, short.before))
        return (now - then) / (short.seconds or 1.0)

    rows = [
        {
            "name": clean(name),
            "tokens": rounded(tokens(name), 1),
            **_rates(counted[name], long.seconds),
            "kept": share(counted[name].get("kept", 0.0), counted[name].get("broken", 0.0)),
            "why": reasons({how[4:]: n for how, n in counted[name].items() if how.startswith("why ")}),
        }
        for name in busiest[: MOST["tenants"]]
    ]
    return rows, len(busiest) - len(rows)
