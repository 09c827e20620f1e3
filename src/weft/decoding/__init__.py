"""Greedy search, sampling and beam search: they see a model's `start` and `step` alone."""
