"""Checkpoints of true geometry and known behaviour, made of random numbers."""
