"""DSA: attention to the tokens that an indexer selects."""
