"""Checkpoints: their contents, their manifest, and the directory of a run."""
