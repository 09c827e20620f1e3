"""Rows, samples, packed items and batches."""
