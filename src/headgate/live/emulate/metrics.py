"""`/metrics` as vLLM shows them, whether the emulator keeps up, and a step trace of what was served."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError
from headgate.core.version import VERSION
from headgate.live.emulate.clock import Clock
from headgate.live.emulate.engine import EmulatedEngine, EngineTally, Histogram
from headgate.live.emulate.service import EmulatorSetup, PortState
from headgate.live.engine.metrics import COUNTERS, GAUGES
from headgate.live.engine.tally import BY_CLASS, QUEUE
from headgate.live.engine.trace import Trace

LABELS = ["model_name", "engine"]
HISTOGRAMS: dict[str, tuple[str, str]] = {  # of the tally: vLLM's name, what it is
    "prompt_length": ("request_prompt_tokens", "Number of prefill tokens processed."),
    "output_length": ("request_generation_tokens", "Number of generation tokens processed."),
    "step_tokens": ("iteration_tokens_total", "Histogram of number of tokens per engine_step."),
    "output_most": ("request_max_num_generation_tokens", "Maximum number of requested generation tokens."),
    "choices": ("request_params_n", "Histogram of the n request parameter."),
    "max_tokens": ("request_params_max_tokens", "Histogram of the max_tokens request parameter."),
    "time_to_first_token": ("time_to_first_token_seconds", "Histogram of time to first token in seconds."),
    "inter_token_latency": ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds."),
    "time_per_output_token": ("request_time_per_output_token_seconds", "Time per output token, per request."),
    "e2e": ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds."),
    "queue": ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request."),
    "inference": ("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request."),
    "prefill": ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request."),
    "decode": ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request."),
    "preemptions_each": ("request_num_preemptions", "How often a request was preempted."),
    "computed": ("request_prefill_kv_computed_tokens", "New KV tokens computed during prefill."),
}
NIXL = {
    "failed_transfers": "Failed NIXL KV cache transfers.",
    "failed_notifications": "Failed NIXL KV cache notifications.",
    "kv_expired_reqs": "Requests whose KV expired before it was read.",
    "notifications_after_expiry": "Reads of KV whose lease had ended.",
}
CACHE_COUNTS = {
    "prefix_cache": ("cache_queries", "cache_hits"),
    "external_prefix_cache": ("loaded_tokens", "loaded_tokens"),
    "mm_cache": ("", ""),
}
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
REASON = "finished_reason"
SLEEP = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}


class PlaceMetrics:
    """Reads the tallies of a port's engines when it is asked."""

    def __init__(self, place: PortState) -> None:
        self._place = place

    def text(self) -> str:
        parts = (self._gauges, self._counters, self._histograms, self._own, self._classes)
        return "".join(family.text() for part in parts for family in part())

    @property
    def _engines(self) -> list[tuple[list[str], EmulatedEngine, EngineTally]]:
        model = self._place.setup.model
        return [([model, str(i)], engine, engine.tally) for i, engine in enumerate(self._place.engines)]

    def _gauges(self) -> Iterator[GaugeFamily]:
        running = _gauge("num_requests_running", "Number of requests in model execution batches.")
        waiting = _gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        reasons = _gauge("num_requests_waiting_by_reason", "Waiting requests by reason.", "reason")
        usage = _gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        sleep = _gauge("engine_sleep_state", "Engine sleep state.", "sleep_state")
        engine = self._place.setup.engine
        words = ["block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching"]
        cache = GaugeFamily("vllm:cache_config_info", "Cache configuration.", ["engine", *words])
        for labels, each, _ in self._engines:
            running.add_metric(labels, each.running)
            waiting.add_metric(labels, each.waiting)
            reasons.add_metric([*labels, "capacity"], each.waiting)
            reasons.add_metric([*labels, "deferred"], 0)
            usage.add_metric(labels, each.kv_usage)
            for state, value in SLEEP.items():
                sleep.add_metric([*labels, state], value)
            blocks = str(each.replica.blocks.total)
            told = [str(engine.block), blocks, str(engine.kv_tokens), str(engine.prefix_cache)]
            cache.add_metric([labels[1], *told], 1)
        yield from (running, waiting, reasons, usage, sleep, cache)

    def _counters(self) -> Iterator[GaugeFamily]:
        plain = {
            "num_preemptions": ("Cumulative number of preemption from the engine.", "preemptions"),
            "prompt_tokens": ("Number of prefill tokens processed.", "prompt_tokens"),
            "generation_tokens": ("Number of generation tokens processed.", "generation_tokens"),
        }
        if self._place.setup.engine.speculation:
            plain["spec_decode_num_drafts"] = ("Number of spec decoding drafts.", "drafts")
            plain["spec_decode_num_draft_tokens"] = ("Number of draft tokens.", "draft_tokens")
            plain["spec_decode_num_accepted_tokens"] = ("Number of accepted tokens.", "accepted_tokens")
        for name, (about, attribute) in plain.items():
            yield self._counter(name, about, lambda tally, key=attribute: {"": getattr(tally, key)})
        yield self._counter(
            "prompt_tokens_cached",
            "Number of cached prompt tokens (local + external).",
            lambda tally: {"": tally.loaded_tokens + tally.cached_tokens},
        )
        looks = self._place.setup.engine.prefix_cache
        for name in CACHE_COUNTS:
            queries, hits = CACHE_COUNTS[name] if looks or name != "prefix_cache" else ("", "")
            for what, key in (("queries", queries), ("hits", hits)):
                count = lambda tally, key=key: {"": getattr(tally, key) if key else 0}  # noqa: E731
                yield self._counter(f"{name}_{what}", f"Cache {what}, in tokens.", count)
        yield self._counter("prompt_tokens_by_source", "Prompt tokens by source.", _by_source, "source")
        yield self._counter(
            "prompt_tokens_cached_by_source", "Prefix-cache hits by tier.", _by_tier, "source"
        )
        yield self._counter(
            "request_success", "Requests by how they ended.", lambda tally: tally.ended_by, REASON
        )
        rejected = CounterFamily(
            "vllm:admission_rejections", "Requests refused by a queue limit.", ["model_name", "reason"]
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            total = sum(tally.rejected[reason] for _, _, tally in self._engines)
            rejected.add_metric([self._place.setup.model, reason], total)
        yield rejected
        if self._place.setup.options.kv_connector:
            for key, about in NIXL.items():
                yield self._counter(f"nixl_num_{key}", about, lambda tally, key=key: {"": tally.nixl[key]})

    def _counter(self, name: str, about: str, count: Any, label: str = "") -> GaugeFamily:
        labels = [*LABELS, label] if label else LABELS
        family = CounterFamily(f"vllm:{name}", about, labels)
        for values, _, tally in self._engines:
            for key, value in count(tally).items():
                family.add_metric([*values, key] if label else values, value)
        return family

    def _histograms(self) -> Iterator[GaugeFamily]:
        for attribute, (name, about) in HISTOGRAMS.items():
            family = HistogramFamily(f"vllm:{name}", about, LABELS)
            for labels, _, tally in self._engines:
                found: Histogram = getattr(tally, attribute)
                family.add_rows(labels, found.rows(), found.sum)
            yield family

    def _own(self) -> Iterator[GaugeFamily]:
        late = HistogramFamily(
            "headgate_emulator_late_seconds",
            "How late steps ended, in real seconds: what the emulator adds to every time it shows.",
            LABELS,
        )
        written = HistogramFamily(
            "headgate_emulator_written_seconds",
            "The same when the last token of the step had been written.",
            LABELS,
        )
        busy = CounterFamily("headgate_emulator_step_seconds", "Emulated time in steps.", LABELS)
        steps = CounterFamily("headgate_emulator_steps", "Steps.", LABELS)
        kept = GaugeFamily("headgate_emulator_kv_exports", "Prompts kept for others.", LABELS)
        for (labels, _, tally), exports in zip(self._engines, self._place.exports, strict=True):
            late.add_rows(labels, tally.late.rows(), tally.late.sum)
            written.add_rows(labels, tally.written.rows(), tally.written.sum)
            busy.add_metric(labels, tally.step_seconds)
            steps.add_metric(labels, tally.steps)
            kept.add_metric(labels, exports.kept)
        yield from (late, written, busy, steps, kept)
        if self._place.setup.options.config:
            yield from self._plug_in()

    def _plug_in(self) -> Iterator[GaugeFamily]:
        """What the plug-in would show of the settings that were read again."""
        setup = self._place.setup
        labels = ["engine", "version", "policy", "card", "model"]
        info = GaugeFamily("headgate_info", "What is on; always 1.", labels)
        renewals = CounterFamily(
            "headgate_renewals",
            "Times the settings were read again and another policy took over.",
            ["engine"],
        )
        for number, count in enumerate(self._place.renewals):
            about = [str(number), VERSION, setup.settings.policy, setup.card.name, setup.model]
            info.add_metric(about, 1)
            renewals.add_metric([str(number)], count)
        yield from (info, renewals)

    def _classes(self) -> Iterator[GaugeFamily]:
        """By class and tenant, as the plug-in shows them."""
        for name, kind in (*((name, CounterFamily) for name in BY_CLASS), (QUEUE, GaugeFamily)):
            about, labels = COUNTERS[name] if name in COUNTERS else GAUGES[name]
            family = kind(name, about, ["engine", *labels])
            for number, engine in enumerate(self._place.engines):
                for values, count in engine.by_class.shown()[name].items():
                    family.add_metric([str(number), *values], count)
            yield family


RANKS = ["model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank"]
SGLANG_HISTOGRAMS = {  # of the tally: SGLang's name
    "time_to_first_token": "time_to_first_token_seconds",
    "inter_token_latency": "inter_token_latency_seconds",
    "time_per_output_token": "request_time_per_output_token_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "queue_time_seconds",
    "prompt_length": "prompt_tokens_histogram",
    "computed": "uncached_prompt_tokens_histogram",
    "output_length": "generation_tokens_histogram",
}


SGLANG_GAUGES: dict[str, tuple[str, Callable[[EmulatedEngine], float]]] = {
    "num_running_reqs": ("The number of running requests.", lambda engine: engine.running),
    "num_queue_reqs": ("The number of requests in the waiting queue.", lambda engine: engine.waiting),
    "token_usage": ("The token usage.", lambda engine: engine.kv_usage),
    "num_used_tokens": ("The number of used tokens.", lambda engine: _pool(engine) - _free(engine)),
    "kv_used_tokens": ("Used token slots in the KV pool.", lambda engine: _pool(engine) - _free(engine)),
    "kv_available_tokens": ("Free token slots in the KV pool.", lambda engine: _free(engine)),
    "cache_hit_rate": (
        "The prefix cache hit rate.",
        lambda engine: engine.tally.cache_hits / max(1, engine.tally.cache_queries),
    ),
    "gen_throughput": (  # over all its steps, where SGLang has the newest
        "The generation throughput (token/s).",
        lambda engine: engine.tally.generation_tokens / (engine.tally.step_seconds or 1.0),
    ),
    "new_token_ratio": (
        "The new token ratio.",
        lambda engine: engine.replica.policy.gauges().get("new_token_ratio", 0.0),
    ),
}
SGLANG_COUNTERS: dict[str, tuple[str, Callable[[EngineTally], float]]] = {
    "prompt_tokens": ("Number of prefill tokens processed.", lambda tally: tally.prompt_tokens),
    "generation_tokens": ("Number of generation tokens.", lambda tally: tally.generation_tokens),
    "cached_tokens": ("Number of cached prompt tokens.", lambda tally: tally.cached_tokens),
    "num_requests": ("Number of requests processed.", lambda tally: sum(tally.ended_by.values())),
    "num_aborted_requests": ("Number of requests aborted.", lambda tally: tally.ended_by["abort"]),
    "num_retracted_requests": ("Number of retracted requests.", lambda tally: tally.preemptions),
}


class SGLangMetrics(PlaceMetrics):
    """The same under SGLang's names (0.5.23). Buckets are vLLM's, and streams are not told from others."""

    def _gauges(self) -> Iterator[GaugeFamily]:
        for name, (about, of) in SGLANG_GAUGES.items():
            family = GaugeFamily(f"sglang:{name}", about, RANKS)
            for values, engine, _ in self._engines:
                family.add_metric(_ranks(values), of(engine))
            yield family

    def _counters(self) -> Iterator[GaugeFamily]:
        for name, (about, of) in SGLANG_COUNTERS.items():
            family = CounterFamily(f"sglang:{name}", about, RANKS)
            for values, _, tally in self._engines:
                family.add_metric(_ranks(values), of(tally))
            yield family

    def _histograms(self) -> Iterator[GaugeFamily]:
        for attribute, name in SGLANG_HISTOGRAMS.items():
            family = HistogramFamily(f"sglang:{name}", HISTOGRAMS[attribute][1], RANKS)
            for values, _, tally in self._engines:
                found: Histogram = getattr(tally, attribute)
                family.add_rows(_ranks(values), found.rows(), found.sum)
            yield family


def _pool(engine: EmulatedEngine) -> int:
    return engine.replica.ledger.kv_total


def _free(engine: EmulatedEngine) -> int:
    return engine.replica.blocks.free * engine.replica.blocks.size


def _ranks(values: list[str]) -> list[str]:
    return [values[0], "unified", "0", "0", "0", values[1]]


def _gauge(name: str, about: str, *more: str) -> GaugeFamily:
    return GaugeFamily(f"vllm:{name}", about, [*LABELS, *more])


def _by_source(tally: EngineTally) -> dict[str, int]:
    loaded, cached = tally.loaded_tokens, tally.cached_tokens
    return dict(zip(SOURCES, (tally.prompt_tokens - loaded - cached, cached, loaded), strict=True))


def _by_tier(tally: EngineTally) -> dict[str, int]:
    return dict.fromkeys(TIERS, 0) | {"device": tally.cached_tokens, "p2p": tally.loaded_tokens}


# -- families as text

ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class GaugeFamily:
    """One metric: its head and a line for each of its label values."""

    kind, suffix = "gauge", ""

    def __init__(self, name: str, about: str, labels: Sequence[str]) -> None:
        self._name, self._labels = name + self.suffix, labels
        self._lines = [f"# HELP {self._name} {about}\n# TYPE {self._name} {self.kind}\n"]

    def add_metric(self, values: Sequence[str], value: float) -> None:
        self._lines.append(f"{self._name}{{{','.join(self._pairs(values))}}} {float(value)}\n")

    def text(self) -> str:
        return "".join(self._lines)

    def _pairs(self, values: Sequence[str]) -> list[str]:
        pairs = zip(self._labels, values, strict=True)
        return sorted(f'{label}="{value.translate(ESCAPES)}"' for label, value in pairs)


class CounterFamily(GaugeFamily):
    """One that only grows."""

    kind, suffix = "counter", "_total"


class HistogramFamily(GaugeFamily):
    """A histogram."""

    kind = "histogram"

    def add_rows(self, values: Sequence[str], rows: Iterable[tuple[str, float]], total: float) -> None:
        """Cumulative counts by upper bound, and the sum of what was counted."""
        pairs, count = self._pairs(values), 0.0
        before = "".join(f"{pair}," for pair in pairs if pair < "le=")
        after = "".join(f",{pair}" for pair in pairs if pair > "le=")
        start, end = f'{self._name}_bucket{{{before}le="', f'"{after}}} '
        for bound, count in rows:
            self._lines.append(f"{start}{bound}{end}{count}\n")
        labels = ",".join(pairs)
        self._lines.append(f"{self._name}_count{{{labels}}} {count}\n")
        self._lines.append(f"{self._name}_sum{{{labels}}} {float(total)}\n")


# -- step traces


def traces(setup: EmulatorSetup, clock: Clock, engines: int) -> list[Trace]:
    """One for each engine, in the folder `out`; none without one."""
    out = setup.options.out
    if out is None:
        return []
    open_folder(out)
    return [Trace(path, _header(setup, clock, number)) for number, path in files(out, engines)]


def open_folder(out: str) -> None:
    """Refuse a folder that holds something, or that cannot be made."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"--out {out} is not empty; choose another folder")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror or error}; choose another folder") from None


def discard(kept: list[Trace]) -> None:
    """Nothing was served: leave no folder behind."""
    for trace in kept:
        trace.close()
        with suppress(OSError):
            trace.path.unlink()
            trace.path.parent.rmdir()


def files(out: str, engines: int) -> Iterator[tuple[int, Path]]:
    """Number and trace of each engine."""
    return ((number, Path(out, f"engine-{number}.jsonl")) for number in range(engines))


def _header(setup: EmulatorSetup, clock: Clock, number: int) -> dict[str, Any]:
    """The first line of a trace. Its times are emulated ones, whatever the speed."""
    card, options = setup.card, setup.options
    return {
        "headgate": VERSION,
        "driver": "emulator",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "zero": clock.wall(0.0),  # the date, in Unix seconds, from which its times are counted
        "policy": setup.policy_name,
        "parameters": setup.parameters,
        "card": card.name,
        "model": card.model,
        "gpu": card.gpu,
        "provenance": card.provenance.source,
        "engine": setup.engine.limits,
        "asynchronous": options.asynchronous,
        "replica": number,
        "kv_tokens": setup.engine.kv_tokens,
        "speed": None if options.virtual else options.speed,
        "versions": {"python": platform.python_version()},
    }
