"""The world: virtual time today, a real engine later."""
