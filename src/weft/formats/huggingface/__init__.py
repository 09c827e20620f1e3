"""The Hugging Face format, in both directions."""
