"""Decides the contents of an engine directory, and writes it."""
