"""Conversion between checkpoint formats, with a parity report."""
