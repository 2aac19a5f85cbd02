"""Compares two engines: accuracy, speed and size."""
