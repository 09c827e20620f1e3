"""SentencePiece's model files, normalizer and segmenter, read without its library."""
