"""Who arrives, when, and how long."""
