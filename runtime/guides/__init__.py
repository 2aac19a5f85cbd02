"""Guides, which constrain outputs, and the grammars to which they are compiled."""
