"""Layers and losses that several models share."""
