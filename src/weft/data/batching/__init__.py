"""Batches of encoded items by token budget."""
