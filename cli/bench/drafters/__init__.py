"""``bench drafters``: an engine's drafters beside each other, by batch and context."""
