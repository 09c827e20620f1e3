"""Rendering of analyses: HTML pages that need no network, with SVG figures, and PNG images."""
