"""Gemma 3's text model: norms around attention and feed-forward, windows in five layers of six."""
