"""What an output must be: guides, and the grammars that they compile to."""
