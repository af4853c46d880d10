"""Real time: engines, emulators and routers on a wall clock."""
