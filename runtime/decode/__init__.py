"""Decoding: scheduling, steps, emission."""
