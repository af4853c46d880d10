"""How many requests a second each policy serves with its promises kept (simulated)."""
