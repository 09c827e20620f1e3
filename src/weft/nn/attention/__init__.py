"""Multi-head attention, attention scores, the key-value cache and positions."""
