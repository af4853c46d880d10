"""The words of a run, from flags or a TOML file, become objects, and the objects a run."""
