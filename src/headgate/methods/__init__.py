"""One folder per scheduling method: its mathematics, then the policy that uses it."""
