"""Mixed batching that turns requests away as vLLM does with --max-num-queued-tokens: answer 503."""

from __future__ import annotations

from headgate.core.plan import Plan
from headgate.core.policy import BatchPolicy
from headgate.core.view import View
from headgate.experiment.run import Maker
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine


class QueueLimited(Mixed):
    """A request leaves when the prompts before it in the queue already reach the limit, whatever its length.

    vLLM decides when the request comes. Here it is decided at the next plan: what stands before a request
    only shrinks, so one that was let in once stays in.
    """

    name = "mixed with a queue limit"

    def __init__(self, slots: int, budget: int, most: int) -> None:
        super().__init__(slots, budget)
        self.most = most

    def plan(self, view: View) -> Plan:
        """As without the limit, less those behind it."""
        before, away = 0, []
        for request in view.waiting.values():
            if before >= self.most and not request.evictions:
                away.append(request.id)
            else:
                before += request.todo
        plan = super().plan(view)
        if not away:
            return plan
        kept = tuple(id for id in plan.prefill if id not in set(away))
        return Plan(plan.decode, kept, plan.budget, reject=tuple(away))


class Limited(Maker):
    """Makes it for the runs of a plan."""

    def __init__(self, engine: Engine, most: int) -> None:
        super().__init__("mixed", {}, engine)
        self.most = most
        self.parameters = {**self.parameters, "max_num_queued_tokens": most}

    def __call__(self) -> BatchPolicy:
        """A policy that no run has used."""
        return QueueLimited(self.engine.running, self.engine.batch_tokens, self.most)
