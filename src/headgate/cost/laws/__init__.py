"""Laws of step time that a card may hold."""
