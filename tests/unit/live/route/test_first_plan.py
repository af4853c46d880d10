"""The plan a live router begins with."""

from argparse import Namespace

from headgate.live.route.config import checked
from headgate.live.route.gate.policy import first_plan
from studies.fleets import live_fleet

ENGINES = [{"url": f"http://e{n}:8000", "slots": 64} for n in range(8)]
CHAT = {"name": "chat", "prompt": 200, "output": 100, "rate": 40}
BATCH = {"name": "batch", "prompt": 2000, "output": 50, "rate": 20}


def flows(*classes: dict, **more: dict) -> dict:
    router = {"name": "gate-and-route+", "card": "cal-h200-qwen3-8b"}
    config = checked({"engines": ENGINES, "router": router, "classes": [*classes], **more})
    return {flow.name: flow for flow in first_plan(config, 8).instance.flows}


def test_a_class_of_which_nothing_is_said_is_a_small_one_like_the_others() -> None:
    found = flows(CHAT, BATCH)["default"]
    assert 8 * found.rate == 0.05 * 60
    assert (found.prompt, found.output) == (1100, 75)


def test_where_nothing_is_said_at_all_every_class_is_the_same() -> None:
    found = flows({"name": "chat"})
    assert {(flow.prompt, flow.output, 8 * flow.rate) for flow in found.values()} == {(512, 256, 1)}


def test_nobody_waits_longer_than_the_queue_allows() -> None:
    found = flows({**CHAT, "patience": 4.0}, {**BATCH, "patience": 400.0}, limits={"queue_ttl": 20.0})
    assert [found[name].impatience for name in ("default", "chat", "batch")] == [1 / 20, 1 / 4, 1 / 20]


def test_live_serves_what_the_simulator_says_on_the_same_requests() -> None:
    """Equal prompts would be found in the emulators' prefix caches: 1.66 times the simulated revenue."""
    words = Namespace(
        seconds=60.0, engines=2, slow=80.0, load=1.3, seed=1, router=["least-loaded"], virtual=True
    )
    found = live_fleet.compare(words)["least-loaded"]
    assert 0.9 < found["live"] / found["simulated"] < 1.1
