"""Search: it sees a model's `start` and `step` alone."""
