"""Import and export of Hugging Face checkpoints."""
