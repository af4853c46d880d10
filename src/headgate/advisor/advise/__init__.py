"""From a trace and a promise to a command line."""
