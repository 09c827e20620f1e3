"""SentencePiece model files, normalizer and segmenter, without the sentencepiece library."""
