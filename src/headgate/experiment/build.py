"""Settings become objects: the engine, and the requests, drawn or read from a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headgate.core.durations import slice_text
from headgate.core.errors import InputError, unknown
from headgate.core.request import Slo
from headgate.cost.card import Card, load_card
from headgate.cost.laws.speculation import Acceptance
from headgate.cost.laws.work import WorkCost
from headgate.experiment.settings import (
    OWN,
    ClassSettings,
    Experiment,
    LengthSettings,
    at_once,
    refuse_conflicts,
)
from headgate.methods.bounds import Requests, engine_bound
from headgate.record.live_trace import is_live_trace, read_live_trace
from headgate.record.tables import Columns, Run
from headgate.settings_base import promised
from headgate.sim.engine.engine import (
    DEFAULT_BUDGET,
    DEFAULT_SLOTS,
    DRAFT_LAUNCH,
    RETRACTION,
    Engine,
    engine_of_card,
    speculate_settings,
    with_speculation,
)
from headgate.sim.engine.replica import VirtualEngine
from headgate.workloads.arrivals import ArrivalProcess, arrival_process, spread, tick_of
from headgate.workloads.lengths import FROM_FILE, LengthLaw, Pairs, length_law
from headgate.workloads.sessions import as_sessions, shared_prefix
from headgate.workloads.streams import stream
from headgate.workloads.synthetic import PAIRS, Share, WorkloadStage, generate
from headgate.workloads.traces import BUNDLED, BadRows, bundled, read_trace
from headgate.workloads.workload import OPEN_LOOP, Kind, Whole, Workload

__all__ = ["DEFAULT_BUDGET", "DEFAULT_SLOTS", "make_engine", "make_workload", "too_long"]
DEFAULT_LENGTH = 512.0
DEFAULT_REQUESTS = 1000
DEFAULT_CLIENTS = 64
MOST_REQUESTS = 10_000_000
# Of a client and of an engine: no request of a class in a closed loop ends sooner than its tokens take.
FASTEST_TOKEN, MOST_SERVED, MOST_SENT = 1e-3, 1000.0, 200_000
SAMPLED = 1000  # requests whose mean is that of their law
OVER_BOUND = 2.0  # times what an engine can serve of a class: so many requests are drawn for its clients
# Of memory for a request and the steps recorded while it runs: 1,956 from 5,000 to 20,000 requests of the
# default lengths and load (`headgate simulate --requests N`, peak of the process). Fewer steps a request take
# less (500 with outputs of 2 tokens), more take more (2,830 with 64 tokens from 4 clients).
BYTES_EACH = 2000


def make_engine(words: Experiment, card: Card) -> Engine:
    limits = {name: getattr(words, name) for name in ("slots", "budget", "kv_tokens", "model_len", "block")}
    engine = engine_of_card(card, **limits)
    cost = engine.cost.graphed(words.graph) if words.graph else engine.cost
    retraction = RETRACTION[words.engine]
    engine = engine._replace(cost=cost, prefix_cache=words.prefix_cache, retraction=retraction)
    if words.speculate is None:
        return engine
    own = [one for one in words.classes if one.accept is not None]
    classes = tuple((one.name, Acceptance(one.accept or 0.0, one.accept_spread or inf)) for one in own)
    every_class = bool(own) and len(own) == len(words.classes)
    return with_speculation(engine, card, words.speculate, classes, every_class)


# -- speculative decoding

AT_MOST = (
    "card {} was not measured with speculation: a pass of the drafter is taken for {:.2g} ms, one layer of "
    "the model and {:g} ms, and what else it takes for nothing, so gains are at most these"
)


BURSTS = "steps deliver up to 1 + {} tokens of a request: gaps are between deliveries, TPOT is per token"


def refuse_speculation(words: Experiment, command: str) -> None:
    if words.speculate is not None and speculate_settings(words.speculate).drafts:
        raise InputError(f"{command} counts in tokens, not in steps: it cannot plan for --speculate; drop it")


def speculation_notes(engine: Engine, card: Card, words: Experiment) -> list[str]:
    """What is assumed of drafts; nothing where they were measured or their prices given."""
    if engine.speculation is None or not isinstance(engine.cost, WorkCost):
        return []
    asked, drafting = speculate_settings(words.speculate or "0"), engine.cost.drafting
    said = [BURSTS.format(engine.speculation.drafts)]
    measured = card.speculation is not None and card.expected_error is None
    if measured or drafting is None or (asked.draft is not None and asked.speculating is not None):
        return said
    return [*said, AT_MOST.format(card.name, 1000 * drafting.draft, 1000 * DRAFT_LAUNCH)]


def make_workload(words: Experiment, seed: int | None = None) -> tuple[Workload, BadRows]:
    refuse_conflicts(words)
    seed = words.seed if seed is None else seed
    if words.trace is None:
        workload, bad = _drawn(words, seed), BadRows()
    else:
        workload, bad = _traced(words, words.trace, seed)
    if (promise := promised(words)) != Slo():  # to all but background work; what a class is worth stays
        kinds = tuple(
            kind if kind.slo.background else kind._replace(slo=promise._replace(weight=kind.slo.weight))
            for kind in workload.kinds
        )
        workload = replace(workload, kinds=kinds)
    workload = beside_clients(words, workload, seed)
    if words.cap_prompt or words.cap_output:
        workload = workload.cap(words.cap_prompt, words.cap_output)
    given = {"patience": words.patience, "abort": words.abort}
    columns: dict[str, Any] = {
        name: np.full(len(workload), value) for name, value in given.items() if value is not None
    }
    return replace(workload, **columns), bad


def too_long(workload: Workload, engine: Engine) -> int:
    """How many can never fit: a run refuses them one by one; where none is left the input is wrong."""
    number = int(np.count_nonzero(workload.prompt >= engine.longest))
    if number == len(workload):
        raise InputError(
            f"no request fits: the shortest prompt has {workload.prompt.min()} tokens, prompt and output may "
            f"have {engine.longest} (model length {engine.max_model_len}, KV {engine.kv_tokens}); raise "
            "--model-len or --kv-tokens, or cut prompts with --cap-prompt"
        )
    refuse_endless(workload, engine)
    return number


def refuse_endless(workload: Workload, engine: Engine) -> None:
    if not workload.beside:
        return
    closed = workload.clients > OPEN_LOOP
    senders = np.stack([workload.kind, workload.tenant])[:, closed]
    for kind, tenant in np.unique(senders, axis=1).T.tolist():
        mine = closed & (workload.kind == kind) & (workload.tenant == tenant)
        if (shortest := int(workload.prompt[mine].min())) >= engine.longest:
            raise InputError(
                f"classes.{workload.kinds[kind].name}: no request of its clients fits: the shortest prompt "
                f"has {shortest:,} tokens, prompt and output may have {engine.longest:,}; raise --model-len "
                "or --kv-tokens, or cut prompts with --cap-prompt"
            )


def _drawn(words: Experiment, seed: int) -> Workload:
    clients, process = _load(words)
    refuse_many(words.requests or sum(stage.requests for stage in words.stages))
    requests = words.requests or (None if words.stages else DEFAULT_REQUESTS)
    stages = [
        WorkloadStage(
            one.requests,
            one.rate,
            one.clients,
            _law(words, "prompt", one.prompt) if one.prompt else None,
            _law(words, "output", one.output) if one.output else None,
        )
        for one in words.stages
    ]
    if words.classes:
        shares = [_share(share) for share in words.classes if not share.clients]
        lengths: dict[str, Any] = {"name": "mix", "classes": shares}
    else:
        lengths = {which: _law(words, which) for which in ("prompt", "output")} | {"name": words.workload}
    around = _around(words)
    rows = requests and requests + 2 * around
    drawn = generate(rows, seed=seed, arrivals=process, clients=clients, stages=stages, **lengths)
    made = _with_sessions(words, drawn, seed)
    if not (around and requests):
        return made
    place = np.arange(len(made))
    made = made.subset((place >= around) & (place < around + requests))
    return replace(made, arrival=made.arrival - made.arrival[0])


def _around(words: Experiment) -> int:
    """Turns to draw before and after those of the run: its conversations are under way when it begins, and so
    the rate is the same from the first second to the last.
    """
    if words.stages or not (words.turns and words.rate):
        return 0
    lasts = (words.turns - 1) * (words.think or 0.0)
    rows = LASTING * words.rate * lasts
    if rows > MOST_AROUND:
        raise InputError(
            f"--turns {words.turns:g}: conversations of {lasts:.0f} s at {words.rate:g} requests/s are too "
            "many at a time; give a shorter --think, fewer --turns or a lower --rate"
        )
    return ceil(rows)


def beside_clients(words: Experiment, workload: Workload, seed: int) -> Workload:
    own = [_clients_of(words, share, workload, seed) for share in words.classes if share.clients]
    return workload.merge(*own) if own else workload


def _clients_of(words: Experiment, share: ClassSettings, beside: Workload, seed: int) -> Workload:
    """At most `MOST_SENT`: of a longer run the clients are silent at the end, which `warning` says."""
    law, clients = _share(share), share.clients or 1
    outputs = law.output.draw(SAMPLED, stream(seed, "clients"))
    prompts = law.prompt.draw(SAMPLED, stream(seed, "clients prompts"))
    most = _most_served(words, share, prompts, outputs) * (words.engines or 1)
    fastest = min(clients / (FASTEST_TOKEN * float(outputs.mean())), most)
    rows = min(clients + ceil(float(beside.arrival[-1]) * fastest), max(clients, MOST_SENT))
    refuse_many(rows)
    drawn = generate(rows, seed=seed, classes=[law], clients=clients)
    return _with_sessions(words, drawn, seed).cap(words.cap_prompt, words.cap_output)


def _most_served(words: Experiment, share: ClassSettings, prompts: Whole, outputs: Whole) -> float:
    """Requests a second of a class on one engine; `MOST_SERVED` where they may leave or share a prefix."""
    longest_prompt, longest_output = words.cap_prompt or inf, words.cap_output or inf
    engine = make_engine(words, load_card(words.card))
    fits = np.minimum(prompts, longest_prompt) < engine.longest
    leave = share.patience or words.patience or words.abort
    if leave or share.shared_prefix or words.shared_prefix or not fits.any():
        return MOST_SERVED
    prompts = np.minimum(prompts[fits], longest_prompt)
    outputs = np.minimum(np.minimum(outputs[fits], longest_output), engine.longest - prompts)
    lengths = Requests.of(prompts, outputs - 1).in_steps(engine.burst)
    bound = engine_bound(engine.cost, lengths, engine.running, engine.batch_tokens, engine.kv_tokens).rate
    return float(min(MOST_SERVED, OVER_BOUND * bound / fits.mean()))  # those that do not fit take no time


def ran_out(run: Run, workload: Workload) -> dict[str, int]:
    """The requests that were drawn for clients of a class, where they sent the last one."""
    if not workload.beside:
        return {}
    kinds = np.unique(workload.kind[workload.clients > OPEN_LOOP]).tolist()
    drawn = {place: int(np.count_nonzero(workload.kind == place)) for place in kinds}
    sent = np.bincount(run.requests["kind"].astype(np.int64), minlength=len(workload.kinds))
    return {workload.kinds[place].name: number for place, number in drawn.items() if sent[place] >= number}


def _with_sessions(words: Experiment, workload: Workload, seed: int) -> Workload:
    own = {share.name: share.shared_prefix for share in words.classes}
    texts = [own.get(kind.name, words.shared_prefix) for kind in workload.kinds]
    if not (words.turns or any(texts)):
        return workload
    prefixes = [shared_prefix(text) if text else None for text in texts]
    turns, think = words.turns or 1.0, words.think or 0.0
    return as_sessions(workload, seed=seed, turns=turns, think=think, prefixes=prefixes)


LASTING = 5  # mean conversations that have gone by when a run begins
MOST_AROUND = 200_000


def refuse_many(requests: int) -> None:
    if requests > MOST_REQUESTS:
        raise InputError(
            f"{requests:,} requests are too many for one run: they need about "
            f"{requests * BYTES_EACH / 1e9:,.0f} GB of memory; ask for at most {MOST_REQUESTS:,} (about "
            f"{MOST_REQUESTS * BYTES_EACH / 1e9:.0f} GB), or run several seeds"
        )


def _load(words: Experiment) -> tuple[int | None, ArrivalProcess | None]:
    if at_once(words):
        return None, None
    rates = [stage.rate for stage in words.stages if stage.rate]
    if words.rate or rates:
        name = words.arrivals or ("gamma" if words.burstiness else "poisson")
        return None, arrival_process(name, words.rate or rates[0], words.burstiness)
    staged = any(stage.clients for stage in words.stages)
    return words.clients or (None if staged else DEFAULT_CLIENTS), None


def _law(words: LengthSettings, which: str, mean: float | None = None) -> LengthLaw:
    name = getattr(words, f"{which}_law") or words.workload
    mean = mean or getattr(words, which)
    given = {word: getattr(words, word) for word, law in OWN.items() if law == name}
    parameters = {word: value for word, value in given.items() if value is not None}
    return length_law(name, mean if name.startswith(FROM_FILE) else mean or DEFAULT_LENGTH, **parameters)


def _share(share: ClassSettings) -> Share:
    promise = promised(share, weight=share.weight, background=share.background)
    kind = Kind(share.name, promise, share.priority)
    prompt, output = _law(share, "prompt"), _law(share, "output")
    return Share(share.share or 1.0, kind, prompt, output, share.patience or inf, share.tenant)


def _traced(words: Experiment, trace: str, seed: int) -> tuple[Workload, BadRows]:
    workload, bad = _read(words, trace)
    if words.slice:
        workload = workload.between(*slice_text(words.slice))
    own_times = not (words.clients or words.rate or words.arrivals)
    if words.requests and words.requests > len(workload):
        if own_times:
            raise InputError(
                f"--requests {words.requests}, but the trace has {len(workload)}; ask for fewer, drop it, or "
                "give --rate: then rows are drawn again and again"
            )
        refuse_many(words.requests)
        workload = resampled(workload, words.requests, seed)
    elif words.requests:
        workload = workload.head(words.requests)
    if own_times and (tick := tick_of(workload.arrival)):
        workload = _ticked(words, workload, tick, seed)
    if words.scale_rate:
        workload = workload.scale_rate(words.scale_rate)
    if own_times:
        return workload, bad
    clients, process = _load(words)
    if clients:
        return workload.as_closed(clients), bad
    if process is None:
        return workload.all_at_once(), bad
    return workload.arriving(process.draw(len(workload), stream(seed, "arrivals"))), bad


def resampled(trace: Workload, requests: int, seed: int, arrivals: ArrivalProcess | None = None) -> Workload:
    """Rows drawn with replacement; what the trace's rows share is not theirs."""
    pairs = Pairs(trace.prompt, np.minimum(trace.output, trace.limit))
    drawn = generate(requests, seed=seed, arrivals=arrivals, pairs=pairs, name=trace.name)
    rows = pairs.rows(requests, stream(seed, PAIRS))  # the same again, for their classes
    said = f"{requests:,} requests are drawn from {len(trace):,} rows with replacement; prompts share nothing"
    whose: dict[str, Any] = {name: getattr(trace, name)[rows] for name in ("kind", "priority", "tenant")}
    whose |= {"kinds": trace.kinds, "tenants": trace.tenants}
    return replace(drawn, **whose, origin={**trace.origin, "resampled": said})


def _ticked(words: Experiment, workload: Workload, tick: float, seed: int) -> Workload:
    known = workload.origin.get("format") == "mooncake"
    together = len(workload) / len(np.unique(workload.arrival))
    shared = f"arrivals come in ticks of {tick:g} s, {together:.3g} at once"
    if known if words.spread_ticks is None else words.spread_ticks:
        note = f"{shared}; they are spread over their tick (--no-spread-ticks keeps them)"
        workload = workload.arriving(spread(workload.arrival, tick, seed))
    else:
        note = f"{shared}: bursts that no client made; --spread-ticks spreads them"
    return replace(workload, origin={**workload.origin, "ticks": note})


def _read(words: Experiment, trace: str) -> tuple[Workload, BadRows]:
    if trace in BUNDLED:
        return bundled(trace), BadRows()
    if is_live_trace(trace):
        return as_workload(read_live_trace(trace), Path(trace)), BadRows()
    if "/" not in trace and "." not in trace and not (trace and Path(trace).exists()):
        raise unknown("trace", trace, BUNDLED)
    columns, times = words.columns or "", words.times or ""
    return read_trace(trace, words.format, words.skip_bad_rows, columns, times)


def as_workload(run: Run, path: Path) -> Workload:
    """Requests that broke off have the mean output of their class, as they would have gone on.

    Prompts are not in a trace, so what requests share is not known. Their hits are, and are replayed.
    """
    rows = run.requests
    done, kind = run.completed(), rows["kind"].astype(np.int64)
    if not done.any():
        raise InputError(f"trace {path}: no request was served to its end; let the engine serve some first")
    output = np.maximum(rows["output"], 1)
    for place in np.unique(kind[~done]).tolist():
        mine = kind == place
        mean = output[done & mine if (done & mine).any() else done].mean()
        output = np.where(mine & ~done, np.maximum(output, round(mean)), output)
    order = np.argsort(rows["arrival"], kind="stable")
    promises = ({name: row[name] for name in Slo._fields if name in row} for row in run.kinds)
    kinds = [Kind(str(row["name"]), Slo(**slo)) for row, slo in zip(run.kinds, promises, strict=True)]
    columns: Columns = {name: rows[name] for name in ("prompt", "priority", "tenant") if name in rows}
    columns |= {"arrival": rows["arrival"] - rows["arrival"].min(), "kind": kind, "output": output}
    columns |= {"cached": np.clip(rows["cached"], 0, rows["prompt"] - 1)}
    about: dict[str, Any] = {name: values[order] for name, values in columns.items()}
    about |= {"name": path.name.split(".")[0], "tenants": run.tenants, "kinds": kinds}
    return Workload.of(**about, origin={"trace": path.name, "format": "headgate-serve"})


def cache_record(engines: Sequence[VirtualEngine]) -> dict[str, object]:
    evicted = [engine.cache.evicted for engine in engines if engine.cache is not None]
    return {"prefix_evicted": evicted} if evicted else {}


def described(workload: Workload) -> dict[str, object]:
    """For run.json; `clients_beside` are those of each class in a closed loop beside an open one."""
    kinds = workload.kinds
    load = "closed" if workload.closed else "open" if np.ptp(workload.arrival) else "all-at-once"
    requests, beside = len(workload), dict[str, int]()
    if workload.beside:
        requests = int(np.count_nonzero(workload.clients == OPEN_LOOP))
        closed = workload.clients > OPEN_LOOP
        groups = np.stack([column[closed] for column in (workload.kind, workload.tenant, workload.clients)])
        most = {(kind, tenant): clients for kind, tenant, clients in np.unique(groups, axis=1).T.tolist()}
        for (kind, _), clients in most.items():  # sorted: the most clients of each come last
            beside[kinds[kind].name] = beside.get(kinds[kind].name, 0) + clients
    about: dict[str, object] = {
        "workload": {"name": workload.name, "requests": requests, **workload.origin},
        "load": load,
        "clients": None if beside else int(workload.clients.max()) or None,
        "kinds": [{"name": kind.name, **kind.slo.said()} for kind in workload.kinds],
    }
    about |= {"clients_beside": beside} if beside else {}
    return about | ({"tenants": list(workload.tenants)} if len(workload.tenants) > 1 else {})


def by_tenant(tables: dict[str, Columns], workload: Workload, rows: Sequence[int] = ()) -> dict[str, Columns]:
    """A number is a row of the workload, or its place in `rows` where clients send beside an open loop."""
    if len(workload.tenants) > 1:
        requests = tables["requests"]
        numbers = requests["id"].astype(np.int64)
        requests["tenant"] = workload.tenant[np.array(rows)[numbers] if rows else numbers]
    return tables


class Unservable(NamedTuple):
    number: int = 0
    total: int = 0
    longest: int = 0  # from this prompt on none fits

    @property
    def said(self) -> str:
        if not self.number:
            return ""
        return (
            f"Cannot be served: {self.number:,} of {self.total:,} requests "
            f"({100 * self.number / self.total:.3g} %) have prompts of {self.longest:,} tokens or more, "
            "which is all that model length or KV allow. They are left out of every figure but their count; "
            "raise --model-len (vLLM: --max-model-len) or cut prompts with --cap-prompt."
        )

    def before(self, document: dict[str, Any]) -> dict[str, Any]:
        if not self.number:
            return document
        lost = {"requests": self.number, "of": self.total, "prompt_tokens_from": self.longest}
        return {"cannot_be_served": {**lost, "said": self.said}, **document}


ALL_FIT = Unservable()


def unservable(workload: Workload, engine: Engine) -> Unservable:
    return Unservable(too_long(workload, engine), len(workload), engine.longest)


def servable(workload: Workload, engine: Engine) -> Workload:
    fits = np.asarray(workload.prompt < engine.longest)
    return workload.subset(fits) if too_long(workload, engine) else workload
