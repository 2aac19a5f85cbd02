"""Builds engine directories from checkpoints: readers, models, export, passes, lowering, writer."""
