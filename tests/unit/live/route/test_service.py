"""Whole requests through the router: what goes on, what comes back."""

from fake_engines import stream
from router_world import routed, run


def test_a_stream_and_a_whole_answer() -> None:
    async def work() -> None:
        async with routed(stream, stream) as world:
            answer = await world.stream()
            assert answer.status == 200
            assert answer.events[-1] == b"[DONE]"
            assert answer.body in [call.sent for engine in world.engines for call in engine.calls]
            assert answer.headers["x-headgate-tries"] == "1"
            whole = await world.ask()
            assert whole.json["usage"]["completion_tokens"] == 3
            await world.settled()
            assert world.counted("requests_total", **{"class": "default", "outcome": "ok"}) == 2
            assert world.counted("output_tokens_total", **{"class": "default"}) == 6
            assert sorted(len(engine.seen) for engine in world.engines) == [1, 1]

    run(work())
