"""Rewrites of the portable graph to the ops that have kernels, one rule a file."""
