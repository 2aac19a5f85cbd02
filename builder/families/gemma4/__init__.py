"""Gemma 4's text part: heads by layer type, shared caches, experts beside a dense MLP."""
