"""The largest rate a policy sustains under service levels."""
