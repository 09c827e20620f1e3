"""Recipes compared on the same data at the same budget."""
