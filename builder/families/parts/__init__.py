"""Torch modules that families share."""
