"""Checkpoints with real sizes, random weights and known output."""
