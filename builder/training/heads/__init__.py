"""Trains what a retrofit added, the backbone frozen: latents of keys and values, indexers."""
