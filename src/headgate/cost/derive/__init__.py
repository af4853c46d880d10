"""A card from a model's shape and a GPU."""
