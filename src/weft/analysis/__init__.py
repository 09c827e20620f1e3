"""What a model attends to, how gradients flow, which layers and vectors know what."""
