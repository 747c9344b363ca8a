"""Low-rank deltas of products (LoRA), for rows of different adapters in one batch."""
