"""Readers and writers of word vectors in the formats of word2vec, GloVe, fastText and gensim."""
