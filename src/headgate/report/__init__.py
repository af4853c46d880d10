"""Results as documents, rendered to a terminal or to one HTML file that needs nothing else."""
