"""The fewest engines for a load."""
