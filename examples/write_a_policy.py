"""A policy of your own in fifteen lines: prefill only while fewer than half of the slots decode.

Everything it may know is on the view; everything it may want is in the plan. It says how long its answer
holds; saying nothing (the default lease is one step) is right too, only slower.

Does it keep the laws?    headgate check write_a_policy.py:HalfFull
How good is it?           headgate compare --policy mixed --policy write_a_policy.py:HalfFull
"""

from headgate import (
    ALL,
    NONE,
    BatchPolicy,
    Plan,
    Until,
    View,
    card_engine,
    generate,
    length_law,
    simulate,
    summarise,
)


class HalfFull(BatchPolicy):
    """Fill the engine when it is half empty, else decode."""

    def plan(self, view: View) -> Plan:
        slots = view.limits.running - len(view.decoding) - len(view.prefilling)
        half_empty = 2 * len(view.decoding) <= view.limits.running
        first = next(iter(view.waiting.values()), None)
        fits = first is not None and slots > 0 and first.todo <= view.kv_free
        if view.prefilling or (half_empty and fits):
            return Plan(NONE, (*view.prefilling, *list(view.waiting)[:slots]))
        return Plan(ALL, until=Until(finishes=1, arrivals=1))


if __name__ == "__main__":
    engine = card_engine("cal-h200-qwen3-8b", slots=128)
    lengths = {"prompt": length_law("geometric", 300), "output": length_law("geometric", 200)}
    requests = generate(1000, seed=1, **lengths, clients=256)
    figures = summarise(simulate(engine, HalfFull(), requests))
    print(f"{figures.request_rate.value:.2f} requests/s, mean TTFT {figures.ttft.mean.value:.2f} s")
    print({name: round(share, 3) for name, share in figures.engine.time.items()})
