# %% [markdown]
# # Which router for four engines?
#
# Chat and code completion share four engines. Chat sends short prompts and reads long answers, code sends
# long prompts and wants its first token soon. Open this file as a notebook in an editor that knows `# %%`
# cells, or run it as a script.

# %%
import numpy as np

import headgate

ENGINES = 4
engine = headgate.card_engine("cal-h200-qwen3-8b", slots=128)
chat = headgate.Kind("chat", headgate.Slo(first_token=1.0, between_tokens=0.05))
code = headgate.Kind("code", headgate.Slo(first_token=0.5, between_tokens=0.10))
length = headgate.length_law
requests = headgate.generate(
    3000,
    arrivals=headgate.arrival_process("gamma", rate=70.0, burstiness=0.5),
    classes=[
        headgate.Share(0.7, chat, length("lognormal", 300), length("geometric", 250)),
        headgate.Share(0.3, code, length("lognormal", 2500), length("geometric", 60)),
    ],
)
print(f"{len(requests)} requests, {int(requests.prompt.sum()):,} prompt tokens")

# %% [markdown]
# ## Routers by name
#
# `split` gives two engines to prompts alone; the others send whole requests. Engines run mixed batching.

# %%
NAMES = ("round-robin", "least-loaded", "least-pending", "split:prefill=2")
runs = {name: headgate.simulate_fleet(engine, "mixed", name, requests, engines=ENGINES) for name in NAMES}

# %% [markdown]
# ## A router of our own
#
# Code goes to the engines with the even numbers, chat to the others, each to the less loaded of the two.


# %%
class Apart(headgate.RoutePolicy):
    """Each class has its own half of the engines."""

    sends_at_once = True

    def route(self, fleet: headgate.Fleet) -> headgate.Routing:
        for kind, queue in fleet.queues.items():
            for id in queue:
                mine = fleet.replicas[kind != "code" :: 2]
                return headgate.Routing((headgate.Move(id, min(mine, key=lambda one: one.load).id),))
        return headgate.Routing()


runs["apart"] = headgate.simulate_fleet(engine, "mixed", Apart(), requests, engines=ENGINES)

# %% [markdown]
# ## What users saw
#
# `to_dataframe` gives a frame of polars or pandas where one is installed, else a dictionary of columns.
# The lines below work with all three.

# %%
print(f"\n{'router':16} {'class':5} {'TTFT p50':>9} {'TTFT p99':>9} {'TPOT mean':>10}")
for name, run in runs.items():
    frame = run.to_dataframe("requests")
    column = {
        each: np.asarray(frame[each]) for each in ("kind", "arrival", "first_token", "finished", "output")
    }
    ttft = column["first_token"] - column["arrival"]
    tpot = (column["finished"] - column["first_token"]) / np.maximum(column["output"] - 1, 1)
    for kind in ("chat", "code"):
        mine = column["kind"] == kind
        half, most = np.quantile(ttft[mine], (0.5, 0.99))
        print(f"{name:16} {kind:5} {half:7.3f} s {most:7.3f} s {1000 * tpot[mine].mean():7.1f} ms")

# %% [markdown]
# ## Which differences are real
#
# All runs met the same requests, so differences are paired. An interval that leaves out zero is a finding.

# %%
found = headgate.compare(runs, baseline="least-loaded")
for row in found.rows:
    if row.metric in ("mean TTFT", "p99 TTFT", "mean TPOT"):
        print(f"\n{row.metric} ({row.unit}), least-loaded {row.baseline.value:.3f}")
        for name, other in row.others.items():
            low, high = other.percent.low, other.percent.high
            within = "" if low is None or high is None else f" [{low:+.1f}, {high:+.1f}]"
            print(f"  {name:16} {other.percent.value:+7.1f} %{within}  {other.verdict}")
