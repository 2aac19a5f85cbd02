"""Passes that turn the portable graphs into the CUDA target's ops."""
