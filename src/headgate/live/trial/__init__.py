"""A switchback experiment on a live server: `headgate trial`."""
