"""Reports of plans and reproductions."""
