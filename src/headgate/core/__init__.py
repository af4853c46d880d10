"""The nouns everyone shares: request, view, plan, policy."""
