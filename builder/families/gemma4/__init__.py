"""Gemma 4's text model: heads by layer type, shared caches, experts beside a dense MLP."""
