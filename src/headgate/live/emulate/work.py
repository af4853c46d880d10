"""From a checked body to jobs: prompts as tokens, limits, true lengths, what ends an answer."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from headgate.live.emulate.answers import Answer
from headgate.live.emulate.bodies import (
    MOST_CHOICES,
    Body,
    check_sampling,
    prompts_of,
    stops_of,
    turns_of,
)
from headgate.live.emulate.content import content
from headgate.live.emulate.job import Job
from headgate.live.emulate.kv import wants_import
from headgate.live.emulate.peers import LoadFailedError
from headgate.live.emulate.place import Place
from headgate.live.emulate.problems import ProblemError, parameter
from headgate.live.emulate.shapes import json_text
from headgate.live.emulate.text import Echo, Text, fingerprint
from headgate.live.emulate.tokens import LITTLE, Ids
from headgate.live.engine.requests import promises
from headgate.live.engine.settings import Settings

DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI and vLLM have it
SETTINGS = Settings()


@dataclass
class Prompt:
    """One prompt, its answers' most tokens, and what its KV really holds."""

    ids: Ids
    mark: int
    limit: int
    loaded: int = 0
    true_mark: int = 0


def prompts_in(body: Body, chat: bool, place: Place) -> list[Prompt]:
    """The prompts as tokens; their lengths and limits are checked as vLLM does it."""
    made, tokens = place.made, place.tokens
    if body.model is not None and body.model != made.model:
        text = f"The model `{body.model[:200]}` does not exist. Valid aliases: {made.model}."
        raise ProblemError(text, 404, "model")
    if chat:
        encoded = [tokens.chat(turns_of(body.messages or []))]
    else:
        assert body.prompt is not None
        texts = prompts_of(body.prompt)
        encoded = [tokens.encode(each) if isinstance(each, str) else _ids(each) for each in texts]
    if len(encoded) * max(1, body.n or 1) > MOST_CHOICES:
        raise ProblemError(f"The emulator answers at most {MOST_CHOICES} choices in a request.")
    limit = body.max_tokens
    if chat and body.max_completion_tokens is not None:
        limit = body.max_completion_tokens
    found = [Prompt(ids, fingerprint(ids.tobytes()), _limit(limit, len(ids), chat, made.engine.longest))
             for ids in encoded]  # fmt: skip
    for prompt in found:
        check_sampling(body, prompt.limit)
        prompt.true_mark = prompt.mark
    return found


def _ids(ids: list[int]) -> Ids:
    if max(ids) >= 2**32:
        raise ProblemError(f"Token id {max(ids)} is out of vocabulary")
    return np.array(ids, LITTLE)


def _limit(wanted: int | None, prompt: int, chat: bool, longest: int) -> int:
    """The most output tokens."""
    if wanted is not None and wanted > longest:
        text = f"max_tokens={wanted} cannot be greater than max_model_len={longest}."
        raise parameter(f"{text} Please request fewer output tokens.", "max_tokens", wanted)
    if wanted is not None and wanted < 1:
        raise parameter(f"max_tokens must be at least 1, got {wanted}.", "max_tokens", wanted)
    if prompt >= longest:
        raise parameter(
            f"This model's maximum context length is {longest} tokens. However, your request has {prompt} "
            "input tokens. Please reduce the length of the input messages.",
            "input_tokens",
            prompt,
        )
    asked = longest if wanted is None and chat else wanted or DEFAULT_MAX_TOKENS
    return min(asked, longest - prompt)


async def load_kv(body: Body, prompts: list[Prompt], place: Place, rank: int) -> None:
    """KV from another engine: for the first prompt of a list; the others read blocks not theirs."""
    params, options = body.kv_transfer_params, place.made.options
    if params is None or not wants_import(params) or not options.kv_connector:
        return
    nixl = place.engines[rank].tally.nixl
    for prompt in prompts:
        try:
            prompt.true_mark = await place.peers.read(place.exports[rank].id, params, prompt.mark)
            prompt.loaded = len(prompt.ids) - 1
            nixl["transfers"] += 1
        except LoadFailedError:
            nixl["failed_transfers"] += 1
            if options.kv_load_failure == "fail":
                raise ProblemError("The KV of the request could not be loaded.", 500) from None


def jobs_for(
    body: Body, prompts: list[Prompt], each: int, answer: Answer, place: Place, priority: int
) -> list[Job]:
    """One job for each choice of each prompt."""
    said = promises(body.vllm_xargs, SETTINGS)
    jobs = []
    for number, prompt in enumerate(prompts):
        for copy in range(each):
            text: Text = Text(prompt.true_mark, copy, place.tokens.vocabulary)
            job = Job(len(prompt.ids), 0, prompt.limit, text, answer, number * each + copy)
            job.mark, job.loaded, job.priority = prompt.mark, prompt.loaded, priority
            job.kind, job.slo, job.guess = said
            _decide_length(job, body, prompt, copy, place)
            if place.made.engine.prefix_cache:
                output = job.text.ids(0, min(job.length, job.limit))
                job.content = content(prompt.ids, output, body.cache_salt, place.made.engine.block)
            jobs.append(job)
    return jobs


def _decide_length(job: Job, body: Body, prompt: Prompt, copy: int, place: Place) -> None:
    """How long the answer really is, and what ends it."""
    lengths, given = place.made.lengths, body.max_tokens or body.max_completion_tokens
    natural = job.limit + 1  # never reached: the limit ends it
    if place.made.options.echo:
        pieces = place.tokens.pieces(prompt.ids.tolist())
        job.text = Echo(pieces, prompt.ids.tolist(), [json_text(piece) for piece in pieces])
        natural = len(pieces)
        job.limit = min(job.limit, natural)
    elif not body.ignore_eos and (lengths.decides or given is None):
        natural = max(body.min_tokens, 1, lengths.draw(prompt.mark, copy))
    stop = _stop_at(job, body, min(natural, job.limit))
    if stop is not None:
        natural, job.stop_reason = stop
    job.length, job.stops = natural, natural <= job.limit


def _stop_at(job: Job, body: Body, length: int) -> tuple[int, str | int] | None:
    """After how many tokens a stop string or a stop token ends the answer, and which of them.

    The text of the answer is known beforehand, so it is cut here, where vLLM holds text back meanwhile.
    """
    ids = set(body.stop_token_ids or ())
    known = job.text.ids(0, length) if ids else []
    found = next((place for place, id in enumerate(known, 1) if id in ids and place > body.min_tokens), None)
    stops = stops_of(body)
    if stops:
        pieces = job.text.pieces(0, length if found is None else found)
        ends = list(accumulate(map(len, pieces)))
        text, begin = "".join(pieces), ends[body.min_tokens - 1] if body.min_tokens else 0
        hits = [(at + len(stop), at, stop) for stop in stops
                if (at := text.find(stop, max(0, begin - len(stop) + 1))) >= 0]  # fmt: skip
        if hits:
            end, at, stop = min(hits)
            count = bisect_left(ends, end) + 1
            _cut(job, text[: end if body.include_stop_str_in_output else at], ends[:count])
            return count, stop
    return None if found is None else (found, known[found - 1])


def _cut(job: Job, text: str, ends: list[int]) -> None:
    """The answer is this text, of which each token brings what lies before its end."""
    pieces = [text[begin:end] for begin, end in pairwise((0, *ends))]
    job.text = Echo(pieces, job.text.ids(0, len(ends)), [json_text(piece) for piece in pieces])
