"""A cost card from timed steps: the table, the family of laws, the choice among them."""
