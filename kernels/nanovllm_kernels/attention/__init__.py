"""Attention over a cache in pages: grouped heads and latents, of decode rows and of chunks."""
