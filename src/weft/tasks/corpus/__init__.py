"""Text to a prepared corpus, and its use in a run."""
