"""headgate as the request router of Ray Serve, and a gate that several routers share."""
