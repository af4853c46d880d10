"""SGLang's real scheduler under a policy takes the simulator's steps, one by one, at the same times."""

from __future__ import annotations

import pytest
import virtual
from hypothesis import given
from hypothesis import strategies as st

import headgate
from headgate.live.sglang.fit import EXCLUSIVE, MIXING

POLICIES = (
    "eb:refill=4", "eb:refill=4,max_gap=0.1", "eb-online", "v0", "request-level", "rad", "mixed", "sarathi",
    "sarathi-spf", "look-ahead", "eb+", "keep", "keep:ttft=1,tbt=0.05",
)  # fmt: skip
SOME = ("eb:refill=4", "mixed", "keep:ttft=1,tbt=0.05")
LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])


def test_every_fit_policy_is_tried():
    assert {name.partition(":")[0] for name in POLICIES} == (EXCLUSIVE | MIXING) - {"auto"}


def compare(name, load, size, overlap=False, radix=False):
    """The same steps at the same times, also after retractions.

    With the radix cache only until the first one: a retracted prompt may find its own KV there, which the
    simulator does not know without the contents of requests.
    """
    ours = virtual.simulated(headgate.make_policy(name, size), load, size, overlap)
    bench, seen = virtual.in_sglang(headgate.make_policy(name, size), load, size, overlap, radix=radix)
    upto = min((*ours.evicted_at, *seen.evicted_at), default=None) if radix else None
    assert virtual.totals(bench.steps)[:upto] == ours.steps[:upto]
    assert bench.ends[:upto] == ours.ends[:upto]
    return bench, seen


@LOOPS
@pytest.mark.parametrize("rate", [None, 40.0], ids=["all at once", "Poisson"])
@pytest.mark.parametrize("name", POLICIES)
def test_same_steps(name, rate, overlap):
    bench, _ = compare(name, virtual.workload(40, rate=rate), virtual.engine(), overlap)
    assert len(bench.finished) == 40


@LOOPS
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("name", SOME)
def test_same_steps_with_pages(name, page, overlap):
    compare(name, virtual.workload(40, seed=2, rate=40.0), virtual.engine(page=page), overlap)


@LOOPS
@pytest.mark.parametrize(("page", "kv"), [(1, 2200), (16, 3008), (64, 3008)])
@pytest.mark.parametrize("name", SOME)
def test_same_steps_where_requests_are_retracted(name, page, kv, overlap):
    size, load = virtual.engine(kv=kv, page=page), virtual.workload(seed=3, rate=60.0)
    bench, seen = compare(name, load, size, overlap)
    assert len(bench.finished) == 60
    assert seen.evicted_at or page == 64 or name.startswith("keep")


@LOOPS
@pytest.mark.parametrize(("page", "kv"), [(1, 192), (16, 208)])
def test_a_half_done_prompt_finds_too_little_kv(page, kv, overlap):
    """It runs the piece that has room, then waits; the one decode that then finds none is not aborted."""
    load = headgate.Workload.of([40, 150], [60, 5], arrival=[0.0, 0.0], limit=[60, 5])
    size = virtual.engine(slots=2, kv=kv, page=page, budget=16)
    bench, seen = compare("mixed", load, size, overlap)
    assert len(bench.finished) == 2
    assert len(seen.evicted_at) == 1
    before = bench.steps[: seen.evicted_at[0]]
    assert 0 < sum(dict(step.prompts).get("r1x", 0) for step in before) < 150


@LOOPS
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", ["eb:refill=4", "mixed"])
def test_prompts_in_the_radix_cache_are_not_counted(name, page, overlap):
    """All begin with 320 tokens that an earlier request left: the steps are those of prompts without them."""
    load, size, prefix = (
        virtual.workload(40, seed=4, longest=500),
        virtual.engine(page=page),
        list(range(3, 323)),
    )
    bench = virtual.planned(headgate.make_policy(name, size), overlap=overlap, page=page, radix=True)
    bench.cost = None  # context is another
    bench.serve([(0.0, bench.request("first", prefix, 2))])
    first = len(bench.steps)
    waiting = []
    hook = bench.scheduler._headgate.policy.plan
    bench.scheduler._headgate.policy.plan = lambda view: (
        waiting.append(next(iter(view.waiting.values()), None)) or hook(view)
    )
    bench.serve([(bench.now, request) for _, request in virtual.requests(bench, load, prefix)])
    ours = virtual.simulated(headgate.make_policy(name, size), load, size, overlap)
    assert virtual.totals(bench.steps[first:]) == ours.steps
    seen = [entry for entry in waiting if entry is not None]
    assert seen and all(entry.cached == 320 for entry in seen)  # told before the plan
    bench.check_whole()


@given(data=st.data())
def test_random_worlds(data):
    """WORLDS=1000 for many."""
    page = data.draw(st.sampled_from([1, 1, 16, 64]), "page")
    longest = data.draw(st.integers(40, 900), "longest")
    least = (longest + 64) // page + 3
    most = data.draw(st.sampled_from([3 * least, max(20_000 // page, 3 * least)]), "most pages")
    pages = data.draw(st.integers(least, most), "pages")
    slots = data.draw(st.integers(1, 24), "slots")
    budget = data.draw(st.sampled_from([64, 200, 512, 2048]), "budget")
    size = virtual.engine(slots=slots, kv=pages * page, page=page, budget=max(slots, budget))
    load = virtual.workload(
        data.draw(st.integers(1, 40), "requests"),
        data.draw(st.integers(0, 10**6), "seed"),
        data.draw(st.sampled_from([None, 10.0, 40.0, 200.0]), "rate"),
        longest,
        data.draw(st.integers(3, 60), "outputs"),
    )
    refill = data.draw(st.integers(1, slots), "refill")
    name = data.draw(st.sampled_from(POLICIES), "policy").replace("refill=4", f"refill={refill}")
    overlap, radix = data.draw(st.booleans(), "overlap"), data.draw(st.booleans(), "radix")
    bench, _ = compare(name, load, size, overlap, radix=radix)
    assert len(bench.finished) == len(load)
