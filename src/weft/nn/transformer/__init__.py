"""Transformer blocks and the output projection."""
