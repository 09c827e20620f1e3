"""Scans over time in compiled code, for cells that no library kernel has."""
