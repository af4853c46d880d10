"""Routers that choose an engine for each request at once."""
