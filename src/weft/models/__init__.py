"""Models: `Tokens` in, tensors out."""
