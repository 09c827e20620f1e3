"""The layers that models are built from, and the kernels that run them."""
