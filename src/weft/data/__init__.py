"""Readers, shipped samples, packed items and batches."""
