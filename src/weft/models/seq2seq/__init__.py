"""The recurrent encoder-decoder."""
