"""One page on an engine and on what was measured with it."""
