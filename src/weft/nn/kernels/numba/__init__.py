"""Compiled loops for inference on the CPU."""
