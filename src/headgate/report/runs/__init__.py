"""The report of runs."""
