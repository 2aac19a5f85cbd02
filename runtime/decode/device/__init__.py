"""Decoding with programs that keep their state on a device (CUDA)."""
