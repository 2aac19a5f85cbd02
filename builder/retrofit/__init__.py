"""Gives a trained checkpoint what it was trained without."""
