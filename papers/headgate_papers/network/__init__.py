"""The stochastic network of the gate-and-route paper."""
