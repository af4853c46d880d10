"""Speculation in a real engine under every policy: plain vLLM's tokens, and no draft that does not exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import tiny
from answers import assert_same, conversations, varied
from real import BUDGET, EVERY_POLICY, NEVER_MIXES, Ask, Real, Served, engine
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from headgate.core.plan import ALL, Plan, Until
from headgate.core.policy import Observer, Steps
from headgate.methods.make import split_name
from headgate.methods.mixed.mixed import Mixed

K = 3
NAMES = ["sync", "async"]
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=NAMES)
PROMISES = "keep:ttft=1,tbt=0.05"
LITTLE = {"num_gpu_blocks_override": 32, "max_model_len": 512}
GRAMMAR = {"backend": "xgrammar", "disable_any_whitespace": True}
ASKS = [replace(ask, limit=ask.limit + 12) for ask in conversations(count=24, longest=30)]


class Fed:
    """The lowest token id that the model was fed: below 0 where a draft was announced and never made."""

    def __init__(self) -> None:
        self.lowest, self.steps = 0, 0

    def taken(self) -> int:
        """The lowest so far; from now on it counts anew."""
        lowest, self.lowest = self.lowest, 0
        return lowest

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        prepare = GPUModelRunner._prepare_input_ids

        def prepared(runner: Any, output: Any, requests: int, tokens: int, *rest: Any) -> None:
            prepare(runner, output, requests, tokens, *rest)
            self.lowest = min(self.lowest, int(runner.input_ids.gpu[:tokens].min()))
            self.steps += 1

        patch.setattr(GPUModelRunner, "_prepare_input_ids", prepared)


class Heard(Observer):
    """What the plug-in says of steps, and which requests it says were held."""

    def __init__(self) -> None:
        self.steps: list[Steps] = []
        self.held_requests = 0

    def stepped(self, steps: Steps) -> None:
        self.steps.append(steps)

    def held(self, request: Any, now: float) -> None:
        self.held_requests += 1


class Counted:
    """vLLM's own count of drafts, as its metrics have it."""

    def __init__(self, scheduler: Any) -> None:
        self.drafted = self.accepted = 0
        self._inner = scheduler.make_spec_decoding_stats
        scheduler.make_spec_decoding_stats = self._make

    def _make(self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **words: Any) -> Any:
        self.drafted += num_draft_tokens
        self.accepted += num_accepted_tokens
        return self._inner(
            stats, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **words
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tiny.model(tmp_path_factory.mktemp("drafter"), noise=0.03)
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": K}


@pytest.fixture(scope="module")
def fed() -> Iterator[Fed]:
    seen = Fed()
    with pytest.MonkeyPatch.context() as patch:
        seen.patch(patch)
        yield seen


@pytest.fixture(scope="module", params=[False, True], ids=NAMES)
def real(request: pytest.FixtureRequest, model: Path, drafter: dict[str, Any], fed: Fed) -> Iterator[Real]:
    words = {"speculative_config": drafter, "structured_outputs_config": GRAMMAR}
    with engine(model, request.param, enable_prefix_caching=True, **words) as made:
        yield made


@pytest.fixture(scope="module")
def expected(real: Real) -> Served:
    served = real.serve(ASKS)
    assert varied(served) and served.kinds.drafted
    return served


@pytest.mark.parametrize("arm", [*EVERY_POLICY, PROMISES])
def test_every_policy(real: Real, expected: Served, fed: Fed, arm: str) -> None:
    found = real.serve(ASKS, arm)
    assert_same(real, ASKS, expected, found)
    assert found.kinds.drafted and fed.steps and fed.lowest == 0
    if split_name(arm)[0] in NEVER_MIXES:
        assert not found.kinds.mixed


def test_prompts_of_which_one_token_is_left(real: Real, fed: Fed) -> None:
    """vLLM pads those with drafts that do not exist."""
    short = [
        replace(ask, prompt=ask.prompt[: 1 + 32 * (n % 3)]) if n % 2 else ask for n, ask in enumerate(ASKS)
    ]
    plain, own = real.serve(short), fed.taken()
    for arm in ("eb:refill=4", "eb+", "slai", PROMISES):
        assert_same(real, short, plain, real.serve(short, arm))
        assert fed.taken() >= own  # plain vLLM feeds its padding to the model


def test_drafts_and_tokens_are_counted_as_vllm_counts_them(real: Real, expected: Served) -> None:
    live, theirs = real.scheduler._headgate, Counted(real.scheduler)
    before = [(c.drafted, c.accepted) for c in live.drafts.by_class.values()]
    heard = Heard()
    live.news.listen(heard, True)
    found = real.serve(ASKS, "mixed")
    live.news.listen(heard, False)
    counts = live.drafts.by_class[""]
    drafted, accepted = (sum(column) for column in zip(*before, strict=True)) if before else (0, 0)
    assert counts.drafted - drafted == theirs.drafted > 0
    assert counts.accepted - accepted == theirs.accepted > 0
    assert 1 < live.ledger.limits.tokens_per_step < 1 + K
    decodes = sum(steps.decodes * len(steps.ends) for steps in heard.steps)
    queries = sum(steps.queries * len(steps.ends) for steps in heard.steps)
    # Each decode its token, and the drafts that came with it; ahead, also those of answers that had ended.
    ahead = real.core.vllm_config.scheduler_config.async_scheduling
    assert queries == decodes + theirs.drafted or (ahead and 0 < queries - decodes - theirs.drafted < 50)
    assert not heard.held_requests  # an answer that ends early with its drafts is not taken for a held one
    tokens = sum(len(said) for samples in found.tokens for said in samples)
    assert decodes >= tokens - len(ASKS) - theirs.accepted


def test_a_step_holds_no_more_prompt_tokens_than_planned(real: Real) -> None:
    """Decodes without drafts leave room in the budget that is not for prompts."""

    class Chunks(Mixed):
        def plan(self, view: Any) -> Plan:
            return super().plan(view)._replace(chunk=8, until=Until(steps=1))

    def without_drafts(*args: Any, **words: Any) -> Any:
        for request in real.scheduler.running:
            request.spec_token_ids = []
        return schedule(*args, **words)

    heard, live = Heard(), real.scheduler._headgate
    schedule, real.scheduler.schedule = real.scheduler.schedule, without_drafts
    live.news.listen(heard, True)
    own, real.follow = real.follow, lambda arm: live.take_over(Chunks(16, BUDGET))
    try:
        real.serve([replace(ask, limit=40) for ask in ASKS])
    finally:
        real.scheduler.schedule, real.follow = schedule, own
        live.news.listen(heard, False)
    mixed = [steps for steps in heard.steps if steps.decodes and steps.prefill]
    assert len(mixed) > 20 and max(steps.prefill for steps in mixed) == 8
    assert all(steps.queries == steps.decodes for steps in mixed)


@MODES
def test_preemption(model: Path, drafter: dict[str, Any], fed: Fed, asynchronous: bool) -> None:
    asks = conversations(count=24, longest=90)
    with engine(model, asynchronous, speculative_config=drafter, **LITTLE) as real:
        plain = real.serve(asks)
        assert plain.kinds.preempted
        for arm in ("eb:refill=4", "eb-online", PROMISES):
            found = real.serve(asks, arm)
            assert found.kinds.preempted and found.kinds.drafted
            assert_same(real, asks, plain, found)
            assert fed.lowest == 0


def test_structured_output(real: Real, fed: Fed) -> None:
    grammars = [
        StructuredOutputsParams(choice=["alpha", "beta", "gamma"]),
        StructuredOutputsParams(regex="[a-f]{6,10}"),
        None,
    ]
    asks = [
        replace(ask, limit=30, words={"structured_outputs": grammars[number % 3], "ignore_eos": False})
        for number, ask in enumerate(ASKS)
    ]
    plain, own = real.serve(asks), fed.taken()
    for arm in ("eb:refill=4", "eb-online", PROMISES):
        assert_same(real, asks, plain, real.serve(asks, arm))
        assert fed.taken() >= own  # plain vLLM pads drafts that a grammar forbids


class Falls(Mixed):
    """Holds half of the decodes in turn, then raises."""

    def __init__(self) -> None:
        super().__init__(16, BUDGET)
        self._asked = 0

    def plan(self, view: Any) -> Plan:
        self._asked += 1
        if self._asked > 40:
            raise ValueError("enough")
        if len(view.decoding) > 1:
            return Plan(frozenset([*view.decoding][self._asked % 2 :: 2]), until=Until(steps=1))
        return Plan(ALL, (*view.prefilling, *view.waiting), BUDGET, until=Until(steps=1))


def test_a_fallback(real: Real, expected: Served, fed: Fed) -> None:
    live, own = real.scheduler._headgate, real.follow
    real.follow = lambda arm: live.take_over(Falls())  # type: ignore[method-assign]
    drained, real.drained = real.drained, lambda: None  # type: ignore[method-assign]
    try:
        found = real.serve(ASKS)
    finally:
        real.follow, real.drained = own, drained  # type: ignore[method-assign]
    assert live.fallen is not None and not real.scheduler._headgate_hooks.broken
    live.take_over(None)
    real.drained()
    assert_same(real, ASKS, expected, found)
    assert fed.lowest == 0


def test_prompt_lookup(model: Path) -> None:
    """Drafts are as many as the prompt has: often none."""
    drafts = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    asks = [replace(ask, prompt=[*ask.prompt[:20]] * 3, limit=ask.limit + 20) for ask in ASKS]
    with engine(model, speculative_config=drafts) as real:
        plain = real.serve(asks)
        for arm in ("eb:refill=4", "eb-online", PROMISES):
            found = real.serve(asks, arm)
            assert_same(real, asks, plain, found)
            assert found.kinds.drafted


@MODES
def test_eagle(model: Path, tmp_path: Path, fed: Fed, asynchronous: bool) -> None:
    head = {"method": "eagle", "model": str(tiny.eagle(tmp_path)), "num_speculative_tokens": K}
    asks: list[Ask] = ASKS
    with engine(model, asynchronous, speculative_config=head) as real:
        plain = real.serve(asks)
        for arm in ("mixed", "eb:refill=4", "eb-online", "slai", PROMISES):
            found = real.serve(asks, arm)
            assert_same(real, asks, plain, found)
            assert found.kinds.drafted and fed.lowest == 0, arm
