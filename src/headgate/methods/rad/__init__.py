"""RAD: one prompt at a time, in whole tiles."""
