"""A page about an engine and its measurements."""
