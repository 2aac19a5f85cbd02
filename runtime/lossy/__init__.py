"""Lossy modes, which trade exactness for speed. They are off by default."""
