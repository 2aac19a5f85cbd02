"""Latents and indexers for a checkpoint that was made without."""
