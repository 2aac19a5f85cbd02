"""Rewrites of the portable graph to ops that have kernels, one rule per file."""
