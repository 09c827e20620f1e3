"""word2vec: skip-gram and CBOW."""
