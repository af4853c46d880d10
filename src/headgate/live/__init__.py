<<<<<<< HEAD
"""Real time: servers that speak the protocols of real engines."""
=======
"""Real time."""
>>>>>>> main
