"""Recipes: the schema that one is checked against, and how it is read."""
