"""The engine directory as a build settles and writes it."""
