"""Which request runs now, and on which engine: the queues, a policy, and a guard around the policy."""
