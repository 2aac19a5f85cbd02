"""The op that takes the keys' up-projection into queries (MLA)."""
