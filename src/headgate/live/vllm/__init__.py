"""The scheduler plug-in for vLLM."""
