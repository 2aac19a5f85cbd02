"""Tactics: measured, kept in files, and looked up when an engine is built."""
