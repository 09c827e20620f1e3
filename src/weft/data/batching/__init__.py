"""Encoded items to batches by token budget."""
