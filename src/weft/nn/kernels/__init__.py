"""Kernels: block schedules, self-tests, and the implementations in numba and Triton."""
