"""Tables become figures with intervals."""
