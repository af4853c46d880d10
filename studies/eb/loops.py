"""EB+ against the better of mixed batching and online EB in random closed loops near the crossover."""

from __future__ import annotations

import numpy as np

from headgate.experiment.library import card_engine
from studies.eb.worlds import CARDS, Row, everywhere, rate, requests, serve, short, show

SEEDS = range(1000, 1062)  # none of which the prediction was made on
LAWS = ("uniform", "geometric", "gamma(2)")
SPANS = np.log([[32, 2048], [16, 600], [16, 256]])  # prompt, output, clients
POLICIES = ("mixed", "eb-online", "eb+")


def random_loop(seed: int) -> tuple[str, str, int]:
    """A card, lengths and clients."""
    random = np.random.default_rng(seed)
    card, law = CARDS[random.integers(len(CARDS))], LAWS[random.integers(len(LAWS))]
    prompt, output, clients = (int(np.exp(random.uniform(*span))) for span in SPANS)
    return card, f"{law} {prompt}/{output}", clients


def compare(seed: int) -> Row:
    """Throughput of the three, and what EB+ loses against the better half."""
    card, lengths, clients = random_loop(seed)
    number = 1000 + 5 * clients
    engine, workload = card_engine(card, 256, 8192), requests(lengths, number, clients, seed)
    row: Row = {"seed": seed, "card": short(card), "lengths": lengths, "clients": clients}
    for name in POLICIES:
        run = serve(engine, name, {}, workload)
        row[name] = rate(run, max(clients, number // 5), number - max(clients, number // 20))
    row["loss %"] = 100 * (1 - row["eb+"] / max(row["mixed"], row["eb-online"]))
    return row


def main(quick: bool) -> None:
    """Study 5."""
    rows = everywhere(compare, SEEDS[:8] if quick else SEEDS)
    columns = {"seed": "d", "card": "", "lengths": "", "clients": "d"} | dict.fromkeys(POLICIES, ".3f")
    show("EB+ in random closed loops", rows, columns | {"loss %": ".2f"}, "" if quick else "loops")
    losses = [row["loss %"] for row in rows]
    print(f"\nloss: mean {np.mean(losses):.2f} %, worst {max(losses):.2f} % of {len(rows)}")
