"""What `headgate top` shows of a single engine, vLLM or SGLang, from its /metrics alone."""

from __future__ import annotations

from headgate.live.route.engines import NAMES, SGLANG_NAMES
from headgate.live.route.observe import clean
from headgate.live.route.view import counters
from headgate.live.route.view.counters import (
    Change,
    Counts,
    LiveView,
    Quantiles,
    Row,
    latest,
    reasons,
    rounded,
)

MOST_GAUGES = 16
RUNNING, WAITING, KV = NAMES["running"], NAMES["waiting"], NAMES["kv_usage"]
OUTPUT, INPUT = NAMES["generated"], NAMES["prompt_tokens"]
ENDED, REFUSED = "vllm:request_success_total", "vllm:admission_rejections_total"
TTFT, GAP = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
SERVED, FAILED = ("stop", "length", "repetition"), ("error",)
EVICTED = "vllm:num_preemptions_total"
SGLANG_LIKE = {SGLANG_NAMES[name]: vllm for name, vllm in NAMES.items()} | {
    "sglang:num_requests_total": ENDED,
    "sglang:num_retracted_requests_total": EVICTED,
    **{
        f"sglang:{name[5:]}_{part}": f"{name}_{part}"
        for name in (TTFT, GAP)
        for part in ("bucket", "sum", "count")
    },
}


class EngineView(LiveView):
    """What is shown of one engine. `read` is given its metrics once a second."""

    def __init__(self, url: str) -> None:
        super().__init__("engine")
        self._url, self._read = clean(url), Counts()
        self.at, self.lost = 0.0, ""

    @staticmethod
    def knows(text: str) -> bool:
        """Whether this is the /metrics of an engine."""
        read = _parsed(text)
        return RUNNING in read or "headgate_info" in read

    def read(self, text: str, now: float) -> None:
        self._read, self.at = _parsed(text), now
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
        """Which label of a metric is 1."""
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
            "kept": counters.kept_share(long),
        }

    def _ranks(self, short: Change, long: Change) -> list[Row]:
        """One for each engine core behind the address."""
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
        kept, evicted = counters.kept_by_class(long), long.of("headgate_evictions_total", "class")
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


def _parsed(text: str) -> Counts:
    """Under vLLM's names. Ranks of one SGLang engine each show its figures, and priorities a part of them."""
    read = counters.parsed(text)
    if SGLANG_NAMES["running"] not in read:
        return read
    for name, vllm in SGLANG_LIKE.items():
        for labels, value in read.pop(name, {}).items():
            said = dict(labels)
            if {said.get("tp_rank", "0"), said.get("pp_rank", "0")} == {"0"} and not said.get("priority"):
                key = (("finished_reason", "stop"),) if vllm == ENDED else ()
                bucket = (("le", said["le"]),) if "le" in said else ()
                whole = (("engine", said.get("dp_rank", "0")), *key, *bucket)
                read.setdefault(vllm, {})[whole] = read.get(vllm, {}).get(whole, 0.0) + value
    return read


def _ended(change: Change) -> dict[str, float]:
    """Requests a second, by how they ended."""
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
