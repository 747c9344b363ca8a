"""Norms, gated activations, and rotary embeddings with the store of keys and values."""
