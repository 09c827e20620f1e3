"""Tasks: from rows to batches, from outputs to answers and scores."""
