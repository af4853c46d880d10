"""Serve the same requests under two policies and look at what changed."""

from headgate import Exclusive, Mixed, card_engine, generate, length_law, simulate, summarise

engine = card_engine("cal-h200-qwen3-8b", slots=512, budget=16384)
law = length_law("uniform", 512)
requests = generate(6000, seed=0, prompt=law, output=law, clients=1024)

for name, policy in {"mixed": Mixed(512, 16384), "EB(48)": Exclusive(512, refill=48)}.items():
    figures = summarise(simulate(engine, policy, requests))
    assert figures.stationary, figures.reason  # else the rate says nothing about the long run
    print(
        f"{name:7} {figures.request_rate.value:6.2f} requests/s   "
        f"TPOT {1000 * figures.tpot.mean.value:5.1f} ms   longest gap {figures.longest_gap:5.2f} s"
    )
