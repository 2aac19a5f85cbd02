"""The op that absorbs the keys' up-projection into queries (MLA)."""
