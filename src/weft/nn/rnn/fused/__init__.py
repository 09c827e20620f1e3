"""Fused scans over time in generated numba and Triton kernels, for cells without a torch kernel."""
