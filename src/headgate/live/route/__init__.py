"""An OpenAI-compatible router: the simulator's routers before real engines."""
