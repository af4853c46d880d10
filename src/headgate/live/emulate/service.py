"""Completions and chats: from a body to jobs on an engine of the port, and to the answer."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy, End, Observer
from headgate.cost.card import Card, load_card
from headgate.live.emulate import api
from headgate.live.emulate.clock import Clock
from headgate.live.emulate.engine import EmulatedEngine, EmulatedJob
from headgate.live.emulate.faults import HEADER, IN_STREAM, EmulatedFault, Faults
from headgate.live.emulate.kv import Exports, LoadFailedError, Peers, wants_import
from headgate.live.emulate.options import Options
from headgate.live.emulate.text import LITTLE, Echo, Ids, Text, Tokens, content, fingerprint
from headgate.live.engine.policy import build_policy
from headgate.live.engine.requests import promises
from headgate.live.engine.settings import Settings, read_settings
from headgate.live.sglang import SGLANG
from headgate.live.vllm import VLLM
from headgate.methods.make import make_policy, split_name
from headgate.sim.engine.engine import RETRACTION, Engine, engine_of_card, with_speculation
from headgate.sim.fleet.kv_handover import Transfer
from headgate.workloads.lengths import FROM_FILE, LengthLaw, length_law
from headgate.workloads.traces import BUNDLED, bundled, read_trace

UNPRINTED = re.compile("[^!-~]")


async def complete(request: web.Request) -> web.StreamResponse:
    place = request.app[PLACE]
    if place.inside >= place.setup.options.max_requests:
        raise api.busy()
    place.inside += 1
    try:
        try:
            fault = place.faults.of(request.headers.get(HEADER))
        except InputError as error:
            raise api.ProblemError(str(error)) from None
        chat, own = request.path.startswith("/v1/chat/"), request.path == "/generate"
        with place.reading() as count:
            data = await api.read_bytes(request, count)
            call = Call(api.read_generate(data) if own else api.read_body(data, chat), chat, own)
        if fault is not None and (struck := await _strike_early(request, fault, call, place)) is not None:
            return struck
        try:
            prompts = prompts_in(call.body, chat, place)
            rank = place.choose(_number(request, "x-data-parallel-rank"))
            if (dead := place.engines[rank].dead) is not None:
                raise api.ProblemError(dead, 500)
            tokens = sum(len(prompt.ids) for prompt in prompts)
            place.check_room(place.engines[rank], len(prompts) * call.each, tokens)
        except api.ProblemError:
            if wants_import(call.params):
                await place.peers.free(call.params)
            raise
        return await _answer(request, place, call, prompts, rank, fault)
    finally:
        place.inside -= 1


class Call(NamedTuple):
    body: api.Body
    chat: bool
    own: bool = False  # it came to SGLang's /generate

    @property
    def each(self) -> int:
        return self.body.n or 1

    @property
    def params(self) -> dict[str, Any]:
        return self.body.kv_transfer_params or {}


async def _answer(
    request: web.Request,
    place: PortState,
    call: Call,
    prompts: list[Prompt],
    rank: int,
    fault: EmulatedFault | None,
) -> web.StreamResponse:
    engine = place.engines[rank]
    answer, response = await _open(request, place, call, prompts, fault)
    answer.now = lambda: engine.replica.now
    try:
        failed = await load_kv(call.body, prompts, place, rank)
        urgency = _number(request, "x-vllm-priority")
        priority = call.body.priority if urgency is None else urgency
        for job in jobs_for(call.body, prompts, call.each, answer, place, priority):
            if call.params.get("do_remote_decode") and place.setup.options.kv_connector:
                job.export = f"{answer.head.id}-{job.choice}"
            answer.add(job)
        for job in answer.jobs:
            if failed or (place.draining and not place.setup.sglang):  # SGLang says it by its health alone
                job.fail(failed)
            else:
                engine.submit(job, _arrival(request) if place.clock.virtual else None)
        place.arrived()
        await answer.done
        if isinstance(answer, api.StreamedAnswer):
            assert response is not None
            return await _close(response, answer, fault)
    finally:
        for job in answer.jobs:
            engine.abort(job)
    if answer.error is not None:
        raise api.ProblemError(answer.error, 500)
    if fault is not None:
        await _strike_late(request, fault)
    params = place.exports[rank].params(answer.jobs[0]) if answer.jobs[0].export else None
    return _whole(answer.whole(params), fault)


def _wanted(body: api.Body, chat: bool, place: PortState, prompts: list[Ids]) -> api.Extras:
    options = body.stream_options
    logprobs = body.logprobs
    count: int | None = None
    if chat and logprobs:
        count = min(20, max(0, body.top_logprobs or 0))
    elif not chat and logprobs is not None and logprobs is not False:
        count = min(20, max(0, int(logprobs)))
    echo = tuple(place.tokens.decode(ids.tolist()) for ids in prompts) if body.echo and not chat else ()
    usage = bool(options and options.include_usage)
    running = bool(usage and options and options.continuous_usage_stats)
    details = place.setup.options.prompt_tokens_details
    return api.Extras(usage, running, bool(body.return_token_ids), count, echo, place.clock.virtual, details)


def _number(request: web.Request, header: str) -> int | None:
    text = request.headers.get(header, "")
    return int(text) if len(text) < 19 and text.lstrip("-").isascii() and text.lstrip("-").isdigit() else None


def _arrival(request: web.Request) -> float | None:
    with suppress(KeyError, ValueError):
        if 0 <= (when := float(request.headers["x-emulate-arrival"])) < 1e9:
            return when
    return None


async def _open(
    request: web.Request, place: PortState, call: Call, prompts: list[Prompt], fault: EmulatedFault | None
) -> tuple[api.WholeAnswer, web.StreamResponse | None]:
    """Where the tokens go. A stream is answered 200 at once, whatever happens later."""
    body, chat = call.body, call.chat
    base = request.headers.get("x-request-id") or body.request_id or uuid4().hex[:16]
    prefix = "" if call.own else "chatcmpl-" if chat else "cmpl-"
    id = prefix + UNPRINTED.sub("", base[: api.LONGEST_ID])
    head = api.Head(id, int(time.time()), body.model or place.setup.model, place.fingerprint, chat)
    ids = [prompt.ids for prompt in prompts]
    wanted = _wanted(body, chat, place, ids)
    if call.own:
        wanted = wanted._replace(ids=True)  # so that each event is made for itself
    if not body.stream:
        return (api.GeneratedWhole if call.own else api.WholeAnswer)(head, wanted, ids, call.each), None
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    if fault is not None and fault.kind == "wrong-length":
        response.content_length = int(fault.at) + 1_000_000
    writer = await response.prepare(request)
    assert writer is not None and request.transport is not None
    writer.send_headers()
    chunked = "chunked" in response.headers.get("Transfer-Encoding", "")
    struck = fault if fault is not None and fault.kind in IN_STREAM else None
    streamed = api.GeneratedStream if call.own else api.StreamedAnswer
    return streamed(head, wanted, ids, call.each, request.transport, chunked, struck), response


async def _close(
    response: web.StreamResponse, answer: api.StreamedAnswer, fault: EmulatedFault | None
) -> web.StreamResponse:
    if answer.silent and fault is not None and fault.kind == "stall":
        await asyncio.Event().wait()  # until the client has enough of it
    if fault is not None and fault.kind == "wrong-length":
        answer.write(answer.closing())
        raise ConnectionResetError
    with suppress(ConnectionResetError):  # the client has gone with its last token
        if closing := answer.closing():
            await response.write(closing)
        await response.write_eof()
    return response


async def _strike_late(request: web.Request, fault: EmulatedFault) -> None:
    """Faults of a stream, for an answer in one piece: it never comes, or the connection ends instead."""
    if fault.kind == "stall":
        await asyncio.Event().wait()
    if fault.kind in ("drop", "reset-mid-event") and request.transport is not None:
        request.transport.abort()
        raise ConnectionResetError


def _whole(body: Any, fault: EmulatedFault | None) -> web.Response:
    data = msgspec.json.encode(body)
    response = web.Response(body=data, content_type="application/json")
    if fault is not None and fault.kind == "wrong-length":
        response.headers["Content-Length"] = str(len(data) + int(fault.at))
        response.force_close()
    return response


async def _strike_early(
    request: web.Request, fault: EmulatedFault, call: Call, place: PortState
) -> web.StreamResponse | None:
    if fault.kind == "slow-head":
        await asyncio.sleep(fault.at)
    elif fault.kind == "reset-before-head":
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError
    elif fault.kind == "error" or (fault.kind == "error-event" and not call.body.stream):
        raise api.ProblemError("emulated fault", int(fault.at) if fault.kind == "error" else 500)
    elif fault.kind == "abort":
        head = api.Head("cmpl-fault", int(time.time()), place.setup.model, place.fingerprint, call.chat)
        answer = api.WholeAnswer(head, api.Extras(), [np.zeros(1, LITTLE)], 1)
        job = EmulatedJob(1, 1, 1, Text(0), answer)
        job.how = End.ABORTED
        answer.jobs.append(job)
        return web.json_response(answer.whole())
    return None


DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI and vLLM have it


@dataclass
class Prompt:
    ids: Ids
    limit: int
    loaded: int = 0

    def __post_init__(self) -> None:
        self.mark = self.true_mark = fingerprint(self.ids.tobytes())


def prompts_in(body: api.Body, chat: bool, place: PortState) -> list[Prompt]:
    setup, tokens = place.setup, place.tokens
    if body.model is not None and body.model != setup.model:
        text = f"The model `{body.model[:200]}` does not exist. Valid aliases: {setup.model}."
        raise api.ProblemError(text, 404, "model")
    if chat:
        encoded = [tokens.chat(api.turns_of(body.messages or []))]
    else:
        assert body.prompt is not None
        encoded = []
        for each in api.prompts_of(body.prompt):
            if not isinstance(each, str) and max(each) >= 2**32:
                raise api.ProblemError(f"Token id {max(each)} is out of vocabulary")
            encoded.append(tokens.encode(each) if isinstance(each, str) else np.array(each, LITTLE))
    if len(encoded) * max(1, body.n or 1) > api.MOST_CHOICES:
        raise api.ProblemError(f"The emulator answers at most {api.MOST_CHOICES} choices in a request.")
    limit = body.max_tokens
    if chat and body.max_completion_tokens is not None:
        limit = body.max_completion_tokens
    prompts = [Prompt(ids, _limit(limit, len(ids), chat, setup.engine.longest)) for ids in encoded]
    for prompt in prompts:
        api.check_sampling(body, prompt.limit)
    return prompts


def _limit(wanted: int | None, prompt: int, chat: bool, longest: int) -> int:
    if wanted is not None and wanted > longest:
        text = f"max_tokens={wanted} cannot be greater than max_model_len={longest}."
        raise api.parameter(f"{text} Please request fewer output tokens.", "max_tokens", wanted)
    if wanted is not None and wanted < 1:
        raise api.parameter(f"max_tokens must be at least 1, got {wanted}.", "max_tokens", wanted)
    if prompt >= longest:
        raise api.parameter(
            f"This model's maximum context length is {longest} tokens. However, your request has {prompt} "
            "input tokens. Please reduce the length of the input messages.",
            "input_tokens",
            prompt,
        )
    asked = longest if wanted is None and chat else wanted or DEFAULT_MAX_TOKENS
    return min(asked, longest - prompt)


async def load_kv(body: api.Body, prompts: list[Prompt], place: PortState, rank: int) -> str | None:
    params, options = body.kv_transfer_params, place.setup.options
    if params is None or not wants_import(params) or not options.kv_connector:
        return None
    nixl = place.engines[rank].tally.nixl
    for prompt in prompts:
        try:
            prompt.true_mark = await place.peers.read(place.exports[rank].id, params, prompt.mark)
            prompt.loaded = len(prompt.ids) - 1
            nixl["transfers"] += 1
        except LoadFailedError:
            nixl["failed_transfers"] += 1
            if options.kv_load_failure == "fail":
                return "The KV of the request could not be loaded."
        except api.ProblemError as problem:
            return problem.message
    return None


def jobs_for(
    body: api.Body, prompts: list[Prompt], each: int, answer: api.WholeAnswer, place: PortState, priority: int
) -> list[EmulatedJob]:
    terms = promises(body.vllm_xargs, place.setup.settings)
    jobs = []
    for number, prompt in enumerate(prompts):
        for copy in range(each):
            text: Text = Text(prompt.true_mark, copy, place.tokens.vocabulary)
            job = EmulatedJob(len(prompt.ids), 0, prompt.limit, text, answer, number * each + copy)
            job.mark, job.loaded, job.priority = prompt.mark, prompt.loaded, priority
            job.kind, job.slo, job.guess, job.tenant = terms
            _decide_length(job, body, prompt, copy, place)
            if place.setup.engine.prefix_cache:
                output = job.text.ids(0, min(job.length, job.limit))
                job.content = content(prompt.ids, output, body.cache_salt, place.setup.engine.block)
            jobs.append(job)
    return jobs


def _decide_length(job: EmulatedJob, body: api.Body, prompt: Prompt, copy: int, place: PortState) -> None:
    lengths, given = place.setup.lengths, body.max_tokens or body.max_completion_tokens
    natural = job.limit + 1  # never reached: the limit ends it
    if place.setup.options.echo:
        pieces = place.tokens.pieces(prompt.ids.tolist())
        job.text = Echo(pieces, prompt.ids.tolist())
        natural = len(pieces)
        job.limit = min(job.limit, natural)
    elif not body.ignore_eos and (lengths.decides or given is None):
        natural = max(body.min_tokens, 1, lengths.draw(prompt.mark, copy))
    if (stop := _stop_at(job, body, min(natural, job.limit))) is not None:
        natural, job.stop_reason = stop
    job.length, job.stops = natural, natural <= job.limit


def _stop_at(job: EmulatedJob, body: api.Body, length: int) -> tuple[int, str | int] | None:
    """After how many tokens the answer stops, and by which stop. Its text is known, so it is cut here."""
    ids = set(body.stop_token_ids or ())
    known = job.text.ids(0, length) if ids else []
    found = next((place for place, id in enumerate(known, 1) if id in ids and place > body.min_tokens), None)
    if stops := api.stops_of(body):
        pieces = job.text.pieces(0, length if found is None else found)
        ends = list(accumulate(map(len, pieces)))
        text, begin = "".join(pieces), ends[body.min_tokens - 1] if body.min_tokens else 0
        hits = [(at + len(stop), at, stop) for stop in stops
                if (at := text.find(stop, max(0, begin - len(stop) + 1))) >= 0]  # fmt: skip
        if hits:
            end, at, stop = min(hits)
            count = bisect_left(ends, end) + 1
            text = text[: end if body.include_stop_str_in_output else at]
            pieces = [text[begin:end] for begin, end in pairwise((0, *ends[:count]))]
            job.text = Echo(pieces, job.text.ids(0, count))
            return count, stop
    return None if found is None else (found, known[found - 1])


# -- one port: its engines, and how many may be there

WAITING_WEIGHT = 4  # a waiting request counts as four running ones when vLLM chooses a rank


class PortState:
    def __init__(
        self,
        setup: EmulatorSetup,
        clock: Clock,
        tokens: Tokens,
        peers: Peers,
        observers: Sequence[Sequence[Observer]],
    ) -> None:
        options = setup.options
        self.setup, self.clock, self.tokens, self.peers = setup, clock, tokens, peers
        self._held = options.hold or 0
        self.engines: list[EmulatedEngine] = []
        for hear in observers:
            policy, ahead = setup.policy(), setup.asynchronous
            engine = EmulatedEngine(setup.engine, policy, clock, asynchronous=ahead, observers=tuple(hear))
            engine.memory.copy = Transfer(options.transfer_delay, options.transfer_per_token)
            if options.crash_after is not None:
                engine.crash_at = options.crash_after
            if self._held:
                engine.begun.clear()
            self.engines.append(engine)
        self.exports = [Exports(engine, options.kv_lease) for engine in self.engines]
        always = None if options.stall_at is None else EmulatedFault("stall", options.stall_at)
        words = {"rate": options.fail_rate, "kind": options.fault, "by_header": options.fault_header}
        self.faults = Faults(always=always, **words)
        self.port = 0
        self.renewals = [0] * len(self.engines)  # policies that took over, since the settings were read again
        self.inside = 0  # requests being answered
        self.bytes = 0  # of bodies being read
        self.draining = False
        self.fingerprint = f"vllm-0.32.0-{sha256(setup.model.encode()).hexdigest()[:8]}"
        self._turn = itertools.count()

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        mine = 0

        def count(more: int) -> None:
            nonlocal mine
            mine += more
            self.bytes += more
            if self.bytes > self.setup.options.max_bytes:
                raise api.busy()

        try:
            yield count
        finally:
            self.bytes -= mine

    def choose(self, wanted: int | None) -> int:
        if wanted is not None and 0 <= wanted < len(self.engines):
            return wanted
        if len(self.engines) == 1:
            return 0
        start = next(self._turn)
        order = [(start + step) % len(self.engines) for step in range(len(self.engines))]
        engines = self.engines
        return min(order, key=lambda rank: engines[rank].waiting * WAITING_WEIGHT + engines[rank].running)

    def check_room(self, engine: EmulatedEngine, more: int, tokens: int) -> None:
        options, rejected = self.setup.options, engine.tally.rejected
        spare = self.setup.engine.running - engine.running
        waiting = engine.waiting + more - max(0, spare)
        if options.max_queued is not None and waiting > options.max_queued:
            rejected["max_num_queued_reqs"] += 1
            raise api.busy()
        if options.max_queued_tokens is not None:
            queued = sum(entry.prompt for entry in engine.replica.ledger.waiting.values())
            if queued + tokens > options.max_queued_tokens:
                rejected["max_num_queued_tokens"] += 1
                raise api.busy()

    def arrived(self) -> None:
        if self._held:
            self._held -= 1
            if not self._held:
                for engine in self.engines:
                    engine.begun.set()


PLACE: web.AppKey[PortState] = web.AppKey("place", PortState)


class EmulatorSetup:
    def __init__(self, options: Options) -> None:
        self.sglang = options.engine == "sglang"
        if self.sglang:  # its own scheduling unless another is named; it hands no KV over
            own = {} if "policy" in options.model_fields_set else {"policy": "sglang"}
            options = options.model_copy(update={"kv_connector": False, **own})
        self.options = options
        self.card: Card = load_card(options.card)
        self.engine: Engine = engine_of_card(
            self.card, options.slots, options.budget, options.kv_tokens, options.model_len, options.block
        )._replace(prefix_cache=options.prefix_cache, retraction=RETRACTION[options.engine])
        if options.speculate is not None:
            self.engine = with_speculation(self.engine, self.card, options.speculate)
        asked = options.asynchronous
        self.asynchronous = self.card.host is not None if asked is None else asked
        self.parameters: dict[str, Any]  # of the policy
        self.model = options.model or self.card.model
        self.settings = read_settings(options.config) if options.config else Settings()
        self.lengths = OutputLengths(options)
        self.policy()  # refused now, or never

    def policy(self) -> BatchPolicy:
        if self.options.config:
            policy, self.parameters = self.from_settings(self.settings)
        else:
            policy, self.parameters = make_policy(*split_name(self.options.policy), self.engine)
        return policy

    @property
    def policy_name(self) -> str:
        return self.settings.policy if self.options.config else split_name(self.options.policy)[0]

    def from_settings(self, settings: Settings) -> tuple[BatchPolicy, dict[str, Any]]:
        """The policy as the plug-in would make it; vLLM's own scheduling is `mixed`, SGLang's `sglang`."""
        engine = self.engine
        if settings.policy == self.options.engine:
            return make_policy("sglang" if self.sglang else "mixed", {}, engine)
        names = "kv_tokens", "block", "max_model_len", "batch_tokens", "running"
        limits = {name: getattr(engine, name) for name in names}
        return build_policy(settings, SGLANG if self.sglang else VLLM, width=engine.width, **limits)


class OutputLengths:
    """How long an answer is where the client does not say: the same for the same prompt, on every engine."""

    def __init__(self, options: Options) -> None:
        self.decides = bool(options.output or options.output_law or options.trace)
        self._from: list[int] | LengthLaw
        if (name := options.trace) is not None:
            workload = bundled(name) if name in BUNDLED else read_trace(name)[0]
            self._from = workload.output.tolist()
        else:
            law = options.output_law or "uniform"
            mean = options.output if law.startswith(FROM_FILE) else options.output or 512.0
            self._from = length_law(law, mean)

    def draw(self, mark: int, choice: int) -> int:
        generator, lengths = np.random.default_rng((mark, choice)), self._from
        if isinstance(lengths, list):
            return lengths[int(generator.integers(len(lengths)))]
        return int(lengths.draw(1, generator)[0])
