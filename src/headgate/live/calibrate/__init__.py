"""Times the steps of a real engine for a cost card."""
