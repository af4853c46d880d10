"""How a fleet splits its engines, and what that is worth."""
