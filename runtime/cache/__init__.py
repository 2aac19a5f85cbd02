"""KV cache: pages, their layout, and where a launch's rows go."""
