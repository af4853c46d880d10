"""The nouns that all folders share: request, view, plan, policy; fleet and router."""
