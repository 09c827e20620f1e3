"""Prepared corpora: memory-mapped token arrays."""
