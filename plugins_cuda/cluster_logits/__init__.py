"""Logits of the tokens in the best clusters of a vocabulary."""
