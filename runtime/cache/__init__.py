"""The KV cache: pages, their layout, the prefix cache, and the places of a launch's rows."""
