"""Compares modes of one checkpoint: without a draft, with one, SpecPV, latents, DSA."""
