"""Data: file readers, sample data sets, prepared corpora, batching and word vectors."""
