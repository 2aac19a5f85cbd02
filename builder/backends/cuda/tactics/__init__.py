"""The choice of kernels for launches: tactics and tactic files."""
