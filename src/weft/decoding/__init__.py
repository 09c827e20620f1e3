"""Greedy search, sampling and beam search: they use a model's `start` and `step` alone."""
