"""Model families: a folder each, and what they are made of."""
