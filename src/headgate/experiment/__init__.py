"""Settings become objects, and the objects a run."""
