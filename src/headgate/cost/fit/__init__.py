"""A cost card from timed steps."""
