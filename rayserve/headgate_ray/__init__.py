"""headgate on Ray: the request router of Ray Serve, and simulations on a cluster."""
