"""One folder per idea: its mathematics, and its policy or router."""
