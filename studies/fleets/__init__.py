"""Studies of routers on the stochastic network of the gate-and-route paper and at token level."""
