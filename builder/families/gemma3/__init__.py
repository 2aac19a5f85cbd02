"""Gemma 3, text only: norms around attention and feed-forward, windows in five layers of six."""
