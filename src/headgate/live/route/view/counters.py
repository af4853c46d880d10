"""Snapshots of a router and of one engine, from samples of counters; all else only when it is asked for."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import Metric

from headgate.core.version import VERSION
from headgate.live.engine.requests import told_apart
from headgate.live.route.observe import clean

if TYPE_CHECKING:
    from headgate.live.route.deliver.legs import RoutedRequest
    from headgate.live.route.engines import Upstream
    from headgate.live.route.request import RefusedError
    from headgate.live.route.server import RouterApp

Labels = tuple[tuple[str, str], ...]
Counts = dict[str, dict[Labels, float]]
Row = dict[str, Any]

MOST = {"engines": 64, "classes": 32, "tenants": 20}  # rows in a snapshot
MOST_REASONS = 12
SHAPE = 1  # version of a snapshot: a field that changes its meaning or goes makes it 2
SHORT, LONG = 10.0, 60.0  # seconds: rates are of the first, shares and percentiles of the second
SHARES = 0.5, 0.95
STRIDE, POINTS = 5.0, 180  # seconds between two points of the timeline, and how many are kept
COLUMNS = ("time", "served", "refused", "failed", "output", "running", "waiting", "ttft", "kv")
PROMISES = "headgate_promises_total"


# -- metrics in text, of vLLM and of SGLang

MOST_SAMPLES = 50_000  # of one text; what follows is not read
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPED = re.compile(r"\\(.)")
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV, EVICTED = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
INPUT, OUTPUT = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
ENDED, REFUSED = "vllm:request_success_total", "vllm:admission_rejections_total"
TTFT, GAP = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
SGLANG_LIKE = {
    "sglang:num_running_reqs": RUNNING,
    "sglang:num_queue_reqs": WAITING,
    "sglang:token_usage": KV,
    "sglang:prompt_tokens_total": INPUT,
    "sglang:generation_tokens_total": OUTPUT,
    "sglang:num_requests_total": ENDED,
    "sglang:num_retracted_requests_total": EVICTED,
    **{
        f"sglang:{name[5:]}{end}": f"{name}{end}"
        for name in (TTFT, GAP)
        for end in ("_bucket", "_sum", "_count")
    },
}


def of_both(names: Collection[str]) -> tuple[str, ...]:
    return (*names, *(theirs for theirs, ours in SGLANG_LIKE.items() if ours in names))


def parsed(text: str, names: tuple[str, ...] = ("",)) -> Counts:
    counts: Counts = {}
    for line in [line for line in text.splitlines() if line.startswith(names)][:MOST_SAMPLES]:
        if (sample := SAMPLE.fullmatch(line)) is None:
            continue
        name, labels, value = sample.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        if isfinite(number):
            pairs = tuple((key, _unescaped(said)) for key, said in LABEL.findall(labels or ""))
            counts.setdefault(name, {})[pairs] = number
    return counts


def _unescaped(text: str) -> str:
    return ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text) if "\\" in text else text


def in_vllm_names(read: Counts) -> Counts:
    """Of SGLang. Ranks of one engine each show its figures, and a gauge the whole beside its priorities."""
    if "sglang:num_running_reqs" not in read:
        return read
    for name, vllm in SGLANG_LIKE.items():
        for labels, value in read.pop(name, {}).items():
            said = dict(labels)
            part = said.get("priority") and vllm in (RUNNING, WAITING, KV)
            if {said.get("tp_rank", "0"), said.get("pp_rank", "0")} == {"0"} and not part:
                key = (("finished_reason", "stop"),) if vllm == ENDED else ()
                bucket = (("le", said["le"]),) if "le" in said else ()
                whole = (("engine", said.get("dp_rank", "0")), *key, *bucket)
                read.setdefault(vllm, {})[whole] = read.get(vllm, {}).get(whole, 0.0) + value
    return read


# -- samples, and what has changed between them


def collected(families: Iterable[Metric]) -> Counts:
    counts: Counts = {}
    for family in families:
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                counts.setdefault(sample.name, {})[tuple(sample.labels.items())] = sample.value
    return counts


class Quantiles(NamedTuple):
    p50: float | None = None
    p95: float | None = None


class Change(NamedTuple):
    """Counters before and now. One that is lower now began anew."""

    seconds: float
    now: Counts
    before: Counts

    def by(self, name: str, *labels: str, **only: str) -> dict[tuple[str, ...], float]:
        """What was gained, summed by these labels; what gained nothing is left out, but for buckets."""
        gains: dict[tuple[str, ...], float] = {}
        before = self.before.get(name, {})
        for key, value in self.now.get(name, {}).items():
            gained = value - before.get(key, 0.0)
            if gained == 0 and self.seconds and "le" not in labels:
                continue
            pairs = dict(key)
            if all(pairs.get(label) == wanted for label, wanted in only.items()):
                group = tuple([pairs.get(label, "") for label in labels])
                gains[group] = gains.get(group, 0.0) + (gained if gained >= 0 else value)
        return gains

    def of(self, name: str, label: str, **only: str) -> dict[str, float]:
        return {value: gained for (value,), gained in self.by(name, label, **only).items()}

    def rate(self, name: str, **only: str) -> float:
        return sum(self.by(name, **only).values()) / self.seconds if self.seconds > 0 else 0.0

    def quantiles(self, name: str, label: str = "") -> dict[str, Quantiles]:
        """Of a histogram's new observations, linear within a bucket, by a label or, without one, under ""."""
        rows: dict[str, list[tuple[float, float]]] = {}
        for (value, le), count in self.by(f"{name}_bucket", label, "le").items():
            bound = inf if le in ("+Inf", "Inf") else float(le)
            rows.setdefault(value, []).append((bound, count))
        quantiles = {}
        for value, found in rows.items():
            found.sort()
            if found[-1][1]:
                quantiles[value] = Quantiles(*(_quantile(found, share) for share in SHARES))
        return quantiles


def _quantile(rows: list[tuple[float, float]], share: float) -> float:
    wanted, below, lower = share * rows[-1][1], 0.0, 0.0
    for bound, count in rows:
        if count >= wanted:
            return lower if bound == inf else lower + (bound - lower) * (wanted - below) / (count - below)
        below, lower = count, bound
    return lower


def latest(counts: Counts) -> Change:
    return Change(0.0, counts, {})


def rounded(value: float | None, digits: int = 3) -> float | None:
    """As it is sent: JSON knows neither infinity nor NaN."""
    return round(value, digits) + 0.0 if value is not None and isfinite(value) else None  # no -0.0


def share(kept: float, broken: float) -> float | None:
    return rounded(kept / (kept + broken), 4) if kept + broken else None


def kept_share(change: Change) -> float | None:
    gained = change.of(PROMISES, "kept")
    return share(gained.get("true", 0.0), gained.get("false", 0.0))


def kept_by_class(change: Change) -> dict[str, dict[str, float | None]]:
    gained = change.by(PROMISES, "class", "promise", "kept")
    kept: dict[str, dict[str, float | None]] = {}
    for kind, promise, _ in gained:
        counts = (gained.get((kind, promise, word), 0.0) for word in ("true", "false"))
        if (value := share(*counts)) is not None:
            kept.setdefault(kind, {})[clean(promise)] = value
    return kept


def reasons(counts: Mapping[str, float]) -> dict[str, int]:
    most = sorted(((n, clean(reason)) for reason, n in counts.items() if n), reverse=True)
    return {reason: round(n) for n, reason in most[:MOST_REASONS]}


class LiveView:
    """A subclass gives the counters of this moment, a row of the timeline, and the rest of a snapshot."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._samples: deque[tuple[float, Counts]] = deque()
        self._points: deque[list[float | None]] = deque(maxlen=POINTS)

    def _counts(self) -> Counts:
        raise NotImplementedError

    def _point(self, change: Change) -> list[float | None]:
        raise NotImplementedError

    def _shown(self, short: Change, long: Change) -> Row:
        raise NotImplementedError

    def sample(self, now: float) -> None:
        if self._samples and now - self._samples[-1][0] < STRIDE - 0.1:
            return
        counts = self._counts()
        point = self._point(self._change(now, counts, 0.0))
        self._points.append([round(time.time(), 1), *(rounded(value) for value in point)])
        self._samples.append((now, counts))
        while len(self._samples) > 2 and self._samples[1][0] <= now - LONG:
            self._samples.popleft()

    def _change(self, now: float, counts: Counts, seconds: float) -> Change:
        if not self._samples:
            return Change(0.0, counts, counts)
        old = [sample for sample in self._samples if sample[0] <= now - seconds]
        at, before = old[-1] if old else self._samples[0]
        return Change(now - at, counts, before)

    def history(self) -> Row:
        return {"headgate": SHAPE, "every": STRIDE, "columns": COLUMNS, "rows": list(self._points)}

    def snapshot(self, now: float) -> Row:
        counts = self._counts()
        short, long = (self._change(now, counts, seconds) for seconds in (SHORT, LONG))
        shown = self._shown(short, long)
        rows = {name: shown[name] for name in MOST}
        left_out = {name: max(len(rows[name]) - most, 0) for name, most in MOST.items()}
        return {
            "headgate": SHAPE,
            "version": VERSION,
            "kind": self._kind,
            "time": round(time.time(), 3),
            "over_s": [round(short.seconds, 1), round(long.seconds, 1)],
            **shown,
            **{name: rows[name][:most] for name, most in MOST.items()},
            "left_out": left_out | shown.get("left_out", {}),
            "point": self._points[-1] if self._points else None,
        }


# -- what `headgate top` shows of a single engine, vLLM or SGLang, from its /metrics alone

MOST_GAUGES = 16
SERVED, FAILED = ("stop", "length", "repetition"), ("error",)


class EngineView(LiveView):
    def __init__(self, url: str) -> None:
        super().__init__("engine")
        self._url, self._read = clean(url), Counts()
        self.at, self.lost = 0.0, ""

    @staticmethod
    def knows(text: str) -> bool:
        read = in_vllm_names(parsed(text))
        return RUNNING in read or "headgate_info" in read

    def read(self, text: str, now: float) -> None:
        self._read, self.at = in_vllm_names(parsed(text)), now
        self.sample(now)

    def _counts(self) -> Counts:
        return self._read

    def _point(self, change: Change) -> list[float | None]:
        ended, kv = _ended(change), list(self._read.get(KV, {}).values())
        return [
            ended["served"],
            change.rate(REFUSED),
            ended["failed"],
            change.rate(OUTPUT),
            self._sum(RUNNING),
            self._sum(WAITING),
            change.quantiles(TTFT).get("", Quantiles()).p95,
            sum(kv) / len(kv) if kv else None,
        ]

    def _shown(self, short: Change, long: Change) -> Row:
        gauges = list(latest(self._read).of("headgate_policy", "gauge").items())[:MOST_GAUGES]
        return {
            "name": self._label("headgate_info", "policy") or "no plug-in",
            "notes": self._notes(),
            "totals": self._totals(short, long),
            "engines": self._ranks(short, long),
            "classes": self._classes(long),
            "tenants": _tenants(short),
            "refused": reasons(long.of(REFUSED, "reason")),
            "changes": [],
            "policy": {clean(name): rounded(value) for name, value in gauges},
        }

    def _label(self, name: str, label: str) -> str:
        chosen = {dict(key).get(label, "") for key, value in self._read.get(name, {}).items() if value}
        return clean(", ".join(sorted(chosen)))

    def _sum(self, name: str) -> float:
        return sum(self._read.get(name, {}).values())

    def _notes(self) -> list[str]:
        notes = [self.lost] if self.lost else []
        if self._sum("headgate_fallen"):
            why = ", ".join(reasons(latest(self._read).of("headgate_fallbacks_total", "reason")))
            notes.append(clean(f"the policy failed and the engine decides alone: {why}"))
        return notes

    def _totals(self, short: Change, long: Change) -> Row:
        ttft, gap = (long.quantiles(name).get("", Quantiles()) for name in (TTFT, GAP))
        return {
            **{how: rounded(rate) for how, rate in _ended(short).items()},
            "refused": rounded(short.rate(REFUSED)),
            "evicted": rounded(short.rate(EVICTED)),
            "output": rounded(short.rate(OUTPUT), 1),
            "input": rounded(short.rate(INPUT), 1),
            "running": self._sum(RUNNING),
            "waiting": self._sum(WAITING),
            "ttft_p50": rounded(ttft.p50),
            "ttft_p95": rounded(ttft.p95),
            "gap_p50": rounded(gap.p50, 4),
            "gap_p95": rounded(gap.p95, 4),
            "kept": kept_share(long),
        }

    def _ranks(self, short: Change, long: Change) -> list[Row]:
        now = latest(self._read)
        running, waiting, kv = (now.of(name, "engine") for name in (RUNNING, WAITING, KV))
        slots, ttft = now.of("headgate_slots", "engine"), long.quantiles(TTFT, "engine")
        return [
            {
                "id": clean(rank) or "0",
                "url": self._url,
                "status": self._label("headgate_phase", "phase") or "up",
                "role": self._label("headgate_mode", "mode"),
                "slots": slots.get(rank),
                "running": count,
                "waiting": waiting.get(rank, 0.0),
                "kv": rounded(kv.get(rank)),
                "output": rounded(short.rate(OUTPUT, engine=rank), 1),
                "ttft": rounded(ttft.get(rank, Quantiles()).p50),
            }
            for rank, count in sorted(running.items())
        ]

    def _classes(self, long: Change) -> list[Row]:
        kept, evicted = kept_by_class(long), long.of("headgate_evictions_total", "class")
        queue = latest(self._read).of("headgate_queue", "class")
        return [
            {
                "name": clean(name),
                "waiting": queue.get(name, 0.0),
                "kept": kept.get(name, {}),
                "why": reasons({"evicted": evicted.get(name, 0.0)}),
            }
            for name in sorted({*kept, *evicted, *queue})
        ]


def _ended(change: Change) -> dict[str, float]:
    ended, seconds = change.of(ENDED, "finished_reason"), change.seconds or 1.0
    rates = {"requests": sum(ended.values()) / seconds}
    for name, hows in (("served", SERVED), ("failed", FAILED)):
        rates[name] = sum(ended.get(how, 0.0) for how in hows) / seconds
    return rates


def _tenants(short: Change) -> list[Row]:
    tokens = sorted(short.of("headgate_tenant_tokens_total", "tenant").items(), key=lambda entry: -entry[1])
    return [
        {"name": clean(name), "tokens": rounded(n / (short.seconds or 1.0), 1)} for name, n in tokens if n
    ]


# -- a router: engines, classes, tenants, the plan beside what happens, and what went wrong last

MOST_ERRORS, MOST_REFUSALS, MOST_CHANGES = 20, 8, 20
ERRORS = ("failed", "passed-on", "client-stalled")
SEEN = ("requests", "refused", "first_token", "promises", "output_tokens", "faults", "retries")
FIRST_TOKEN, REFUSED_HERE = "headgate_first_token_seconds", "headgate_refused_total"


class RouterView(LiveView):
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

    def ended(self, job: RoutedRequest, kept: bool | None) -> None:
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
        if refused.tenant:
            tenant = told_apart(refused.tenant, self._names)
            self._count(tenant, "refused")
            self._count(tenant, f"why {refused.reason}")
        self.refusals.append(_error(id, refused.status, "refused", refused.reason, "", refused.tenant))

    def _count(self, tenant: str, how: str, many: int = 1) -> None:
        self._tenants[("tenant", tenant), ("how", how)] += many

    def _counts(self) -> Counts:
        self._note_states()
        metrics, engines = self._app.metrics, self._app.upstreams.values()
        counts = collected(each for name in SEEN for each in getattr(metrics, name).collect())
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
            change.rate(REFUSED_HERE),
            rates["failed"],
            change.rate("generated"),
            len(roster.places),
            len(roster.waiting),
            change.quantiles(FIRST_TOKEN).get("", Quantiles()).p95,
            sum(up) / len(up) if up else None,
        ]

    def _shown(self, short: Change, long: Change) -> Row:
        plan, (tenants, left_out) = self._plan(), _busiest(short, long)
        return {
            "name": self._app.config.router.name,
            "notes": self._notes(),
            "totals": self._totals(short, long),
            "engines": self._engines(short, long),
            "classes": self._classes(short, long, plan),
            "tenants": tenants,
            "left_out": {"tenants": left_out},
            "refused": reasons(long.of(REFUSED_HERE, "reason")),
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
        ttft = long.quantiles(FIRST_TOKEN).get("", Quantiles())
        return {
            **_rates(ended, short.seconds),
            "refused": rounded(short.rate(REFUSED_HERE)),
            "retried": rounded(short.rate("headgate_retries_total")),
            "output": rounded(short.rate("generated"), 1),
            "running": len(app.gate.roster.places),
            "waiting": len(app.gate.roster.waiting),
            "inflight": app.front.inflight,
            "ttft_p50": rounded(ttft.p50),
            "ttft_p95": rounded(ttft.p95),
            "kept": kept_share(long),
        }

    def _engines(self, short: Change, long: Change) -> list[Row]:
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
        kept, output = kept_by_class(long), short.of("headgate_output_tokens_total", "class")
        ttft, rows = long.quantiles(FIRST_TOKEN, "class"), []
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
    hows = {"served": ("ok",), "refused": ("refused",), "failed": ERRORS, "gone": ("client-gone",)}
    rates = {name: sum(ended.get(how, 0.0) for how in hows[name]) / (seconds or 1.0) for name in hows}
    return {name: rounded(rate) for name, rate in (("requests", sum(rates.values())), *rates.items())}


def _busiest(short: Change, long: Change) -> tuple[list[Row], int]:
    counted: dict[str, dict[str, float]] = {}
    for (tenant, how), gained in long.by("tenants", "tenant", "how").items():
        if gained:
            counted.setdefault(tenant, {})[how] = gained
    tokens = short.of("tenants", "tenant", how="tokens")
    weight = {name: hows.get("tokens", 0.0) + hows.get("refused", 0.0) for name, hows in counted.items()}
    busiest = sorted(counted, key=lambda name: -weight[name])
    rows = [
        {
            "name": clean(name),
            "tokens": rounded(tokens.get(name, 0.0) / (short.seconds or 1.0), 1),
            **_rates(counted[name], long.seconds),
            "kept": share(counted[name].get("kept", 0.0), counted[name].get("broken", 0.0)),
            "why": reasons({how[4:]: n for how, n in counted[name].items() if how.startswith("why ")}),
        }
        for name in busiest[: MOST["tenants"]]
    ]
    return rows, len(busiest) - len(rows)
