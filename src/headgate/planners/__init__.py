"""Pure functions: numbers in, a decision out."""
