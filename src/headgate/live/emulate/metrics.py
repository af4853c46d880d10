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
from headgate.live.emulate.engine import EmulatedEngine
from headgate.live.emulate.service import EmulatorSetup, PortState
from headgate.live.engine.metrics import COUNTERS, GAUGES
from headgate.live.engine.requests import IGNORED
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
SLEEP = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
Of = Callable[[EmulatedEngine], Any]  # a number, a histogram, or numbers by the value of one more label
Table = dict[str, tuple[str, Of] | tuple[str, Of, str]]  # name: what it is, the number, and that label


def _tallied(key: str) -> Of:
    return lambda each: getattr(each.tally, key)


def _transferred(key: str) -> Of:
    return lambda each: each.tally.nixl[key]


def _of_cache(key: str) -> Of:
    return lambda each: getattr(each.tally, key) if each.limits.prefix_cache else 0


def _by_source(engine: EmulatedEngine) -> dict[str, int]:
    cached, loaded = engine.tally.cached_tokens, engine.tally.loaded_tokens
    computed = engine.tally.prompt_tokens - loaded - cached
    return {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": loaded}


def _by_tier(engine: EmulatedEngine) -> dict[str, int]:
    found = {"device": engine.tally.cached_tokens, "p2p": engine.tally.loaded_tokens}
    return {"device": 0, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0} | found


def _free(engine: EmulatedEngine) -> int:
    return engine.replica.blocks.free * engine.replica.blocks.size


def _used(engine: EmulatedEngine) -> int:
    return engine.replica.ledger.kv_total - _free(engine)


VLLM_GAUGES: Table = {
    "num_requests_running": ("Number of requests in model execution batches.", lambda each: each.running),
    "num_requests_waiting": ("Number of requests waiting to be processed.", lambda each: each.waiting),
    "num_requests_waiting_by_reason": (
        "Waiting requests by reason.", lambda each: {"capacity": each.waiting, "deferred": 0}, "reason",
    ),
    "kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", lambda each: each.kv_usage),
    "engine_sleep_state": ("Engine sleep state.", lambda each: SLEEP, "sleep_state"),
}  # fmt: skip
SPECULATION: Table = {
    "spec_decode_num_drafts": ("Number of spec decoding drafts.", _tallied("drafts")),
    "spec_decode_num_draft_tokens": ("Number of draft tokens.", _tallied("draft_tokens")),
    "spec_decode_num_accepted_tokens": ("Number of accepted tokens.", _tallied("accepted_tokens")),
}
VLLM_COUNTERS: Table = {
    "num_preemptions": ("Cumulative number of preemption from the engine.", _tallied("preemptions")),
    "prompt_tokens": ("Number of prefill tokens processed.", _tallied("prompt_tokens")),
    "generation_tokens": ("Number of generation tokens processed.", _tallied("generation_tokens")),
    "prompt_tokens_cached": (
        "Number of cached prompt tokens (local + external).",
        lambda each: each.tally.loaded_tokens + each.tally.cached_tokens,
    ),
    "prefix_cache_queries": ("Cache queries, in tokens.", _of_cache("cache_queries")),
    "prefix_cache_hits": ("Cache hits, in tokens.", _of_cache("cache_hits")),
    "external_prefix_cache_queries": ("Cache queries, in tokens.", _tallied("loaded_tokens")),
    "external_prefix_cache_hits": ("Cache hits, in tokens.", _tallied("loaded_tokens")),
    "mm_cache_queries": ("Cache queries, in tokens.", lambda each: 0),
    "mm_cache_hits": ("Cache hits, in tokens.", lambda each: 0),
    "prompt_tokens_by_source": ("Prompt tokens by source.", _by_source, "source"),
    "prompt_tokens_cached_by_source": ("Prefix-cache hits by tier.", _by_tier, "source"),
    "request_success": ("Requests by how they ended.", _tallied("ended_by"), "finished_reason"),
}
VLLM_HISTOGRAMS: Table = {name: (about, _tallied(key)) for key, (name, about) in HISTOGRAMS.items()}
OWN_HISTOGRAMS: Table = {
    "late_seconds": (
        "How late steps ended, in real seconds: what the emulator adds to every time it shows.",
        _tallied("late"),
    ),
    "written_seconds": (
        "The same when the last token of the step had been written.", _tallied("written"),
    ),
}  # fmt: skip
OWN_COUNTERS: Table = {
    "step_seconds": ("Emulated time in steps.", _tallied("step_seconds")),
    "steps": ("Steps.", _tallied("steps")),
}


class PlaceMetrics:
    prefix, labels, histograms = "vllm:", LABELS, VLLM_HISTOGRAMS

    def __init__(self, place: PortState) -> None:
        self._place = place

    def text(self) -> str:
        families = (*self._engine(), *self._table(HistogramFamily, self.histograms), *self._own())
        return "".join(family.text() for family in (*families, *self._classes()))

    @property
    def _engines(self) -> list[tuple[list[str], EmulatedEngine]]:
        return [([self._place.setup.model, str(i)], engine) for i, engine in enumerate(self._place.engines)]

    def _values(self, values: list[str]) -> list[str]:
        return values

    def _table(self, kind: type[GaugeFamily], table: Table, own: bool = False) -> Iterator[GaugeFamily]:
        prefix, labels = ("headgate_emulator_", LABELS) if own else (self.prefix, self.labels)
        for name, (about, of, *more) in table.items():
            family = kind(prefix + name, about, [*labels, *more])
            for plain, engine in self._engines:
                values, found = plain if own else self._values(plain), of(engine)
                if isinstance(family, HistogramFamily):
                    family.add_rows(values, found.rows(), found.sum)
                    continue
                for key, value in found.items() if more else (("", found),):
                    family.add_metric([*values, *([key] if more else [])], value)
            yield family

    def _engine(self) -> Iterator[GaugeFamily]:
        setup, engine = self._place.setup, self._place.setup.engine
        yield from self._table(GaugeFamily, VLLM_GAUGES)
        words = ["block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching"]
        cache = GaugeFamily("vllm:cache_config_info", "Cache configuration.", ["engine", *words])
        for (_, number), each in self._engines:
            told = (engine.block, each.replica.blocks.total, engine.kv_tokens, engine.prefix_cache)
            cache.add_metric([number, *map(str, told)], 1)
        yield cache
        nixl: Table = {f"nixl_num_{key}": (about, _transferred(key)) for key, about in NIXL.items()}
        yield from self._table(CounterFamily, VLLM_COUNTERS | (SPECULATION if engine.speculation else {}))
        yield from self._table(CounterFamily, nixl if setup.options.kv_connector else {})
        rejected = CounterFamily(
            "vllm:admission_rejections", "Requests refused by a queue limit.", ["model_name", "reason"]
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            total = sum(engine.tally.rejected[reason] for _, engine in self._engines)
            rejected.add_metric([setup.model, reason], total)
        yield rejected

    def _own(self) -> Iterator[GaugeFamily]:
        setup = self._place.setup
        yield from self._table(HistogramFamily, OWN_HISTOGRAMS, own=True)
        yield from self._table(CounterFamily, OWN_COUNTERS, own=True)
        kept = GaugeFamily("headgate_emulator_kv_exports", "Prompts kept for others.", LABELS)
        for (values, _), exports in zip(self._engines, self._place.exports, strict=True):
            kept.add_metric(values, len(exports.kept))
        yield kept
        if not setup.options.config:
            return
        info, renewals = (
            kind(name, table[name][0], ["engine", *table[name][1]])
            for kind, name, table in (
                (GaugeFamily, "headgate_info", GAUGES),
                (CounterFamily, "headgate_renewals", COUNTERS),
            )
        )
        for number, count in enumerate(self._place.renewals):
            about = [str(number), VERSION, setup.settings.policy, setup.card.name, setup.model]
            info.add_metric(about, 1)
            renewals.add_metric([str(number)], count)
        yield from (info, renewals)

    def _classes(self) -> Iterator[GaugeFamily]:
        for name, kind in (*((name, CounterFamily) for name in BY_CLASS), (QUEUE, GaugeFamily)):
            about, labels = COUNTERS[name] if name in COUNTERS else GAUGES[name]
            family = kind(name, about, ["engine", *labels])
            for number, engine in enumerate(self._place.engines):
                for values, count in engine.by_class.shown()[name].items():
                    family.add_metric([str(number), *values], count)
            yield family
        ignored = CounterFamily(WORDS, *COUNTERS[WORDS])
        for word, count in IGNORED.items():
            ignored.add_metric([word], count)
        yield ignored


WORDS = "headgate_ignored_words"
RANKS = ["model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank"]
_NAMES = {  # of the tally: SGLang's name
    "time_to_first_token": "time_to_first_token_seconds",
    "inter_token_latency": "inter_token_latency_seconds",
    "time_per_output_token": "request_time_per_output_token_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "queue_time_seconds",
    "prompt_length": "prompt_tokens_histogram",
    "computed": "uncached_prompt_tokens_histogram",
    "output_length": "generation_tokens_histogram",
}
SGLANG_HISTOGRAMS: Table = {name: (HISTOGRAMS[key][1], _tallied(key)) for key, name in _NAMES.items()}
SGLANG_GAUGES: Table = {
    "num_running_reqs": ("The number of running requests.", lambda engine: engine.running),
    "num_queue_reqs": ("The number of requests in the waiting queue.", lambda engine: engine.waiting),
    "token_usage": ("The token usage.", lambda engine: engine.kv_usage),
    "num_used_tokens": ("The number of used tokens.", _used),
    "kv_used_tokens": ("Used token slots in the KV pool.", _used),
    "kv_available_tokens": ("Free token slots in the KV pool.", _free),
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
SGLANG_COUNTERS: Table = {
    "prompt_tokens": ("Number of prefill tokens processed.", _tallied("prompt_tokens")),
    "generation_tokens": ("Number of generation tokens.", _tallied("generation_tokens")),
    "cached_tokens": ("Number of cached prompt tokens.", _tallied("cached_tokens")),
    "num_requests": ("Number of requests processed.", lambda each: sum(each.tally.ended_by.values())),
    "num_aborted_requests": ("Number of requests aborted.", lambda each: each.tally.ended_by["abort"]),
    "num_retracted_requests": ("Number of retracted requests.", _tallied("preemptions")),
}


class SGLangMetrics(PlaceMetrics):
    """The same under SGLang's names (0.5.23). Buckets are vLLM's, and streams are not told from others."""

    prefix, labels, histograms = "sglang:", RANKS, SGLANG_HISTOGRAMS

    def _values(self, values: list[str]) -> list[str]:
        return [values[0], "unified", "0", "0", "0", values[1]]

    def _engine(self) -> Iterator[GaugeFamily]:
        yield from self._table(GaugeFamily, SGLANG_GAUGES)
        yield from self._table(CounterFamily, SGLANG_COUNTERS)


ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class GaugeFamily:
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
    kind, suffix = "counter", "_total"


class HistogramFamily(GaugeFamily):
    kind = "histogram"

    def add_rows(self, values: Sequence[str], rows: Iterable[tuple[str, float]], total: float) -> None:
        pairs, count = self._pairs(values), 0.0
        before = "".join(f"{pair}," for pair in pairs if pair < "le=")
        after = "".join(f",{pair}" for pair in pairs if pair > "le=")
        start, end = f'{self._name}_bucket{{{before}le="', f'"{after}}} '
        for bound, count in rows:
            self._lines.append(f"{start}{bound}{end}{count}\n")
        labels = ",".join(pairs)
        self._lines.append(f"{self._name}_count{{{labels}}} {count}\n")
        self._lines.append(f"{self._name}_sum{{{labels}}} {float(total)}\n")


def traces(setup: EmulatorSetup, clock: Clock, engines: int) -> list[Trace]:
    if (out := setup.options.out) is None:
        return []
    open_folder(out)
    return [Trace(path, _header(setup, clock, number)) for number, path in files(out, engines)]


def open_folder(out: str) -> None:
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"--out {out} is not empty; choose another folder")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror or error}; choose another folder") from None


def discard(kept: list[Trace]) -> None:
    for trace in kept:
        trace.close()
        with suppress(OSError):
            trace.path.unlink()
            trace.path.parent.rmdir()


def files(out: str, engines: int) -> Iterator[tuple[int, Path]]:
    return ((number, Path(out, f"engine-{number}.jsonl")) for number in range(engines))


def _header(setup: EmulatorSetup, clock: Clock, number: int) -> dict[str, Any]:
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
