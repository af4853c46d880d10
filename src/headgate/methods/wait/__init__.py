"""WAIT and Nested WAIT: a type of request moves when enough of its requests wait."""
