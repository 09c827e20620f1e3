"""Readers of data files: rows and validated examples."""
