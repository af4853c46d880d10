"""Gate-and-route: a fluid plan of the fleet, and routers that follow it."""
