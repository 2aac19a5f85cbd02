"""``bench drafters``: compares an engine's drafters, by batch and context."""
