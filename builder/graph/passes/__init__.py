"""Passes over portable graphs, and how passes run."""
