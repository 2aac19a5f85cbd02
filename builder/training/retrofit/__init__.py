"""Latents and indexers for a checkpoint without them."""
