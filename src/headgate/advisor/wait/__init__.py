"""Thresholds of WAIT and Nested WAIT."""
