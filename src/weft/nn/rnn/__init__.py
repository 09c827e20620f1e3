"""Recurrent layers: cells, deep and bidirectional stacks, fused scans over time."""
