"""Engines that start and stop over a day of traffic."""
