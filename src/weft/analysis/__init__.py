"""Model analysis: attention weights, gradient norms, position encodings, layer probing, word vectors, neighbours."""
