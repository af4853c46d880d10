"""An example for the leaderboard: mixed batching with at most one prompt in a step."""

from headgate import Mixed, Plan, View


class OnePrompt(Mixed):
    """So no step is longer than the longest prompt makes it."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        return Plan(plan.decode, plan.prefill[:1], plan.budget) if plan.prefill else plan
