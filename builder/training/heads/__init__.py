"""Trains the parts of a retrofit with a frozen backbone: latents of keys and values, indexers."""
