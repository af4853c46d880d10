"""KV memory of an engine."""
