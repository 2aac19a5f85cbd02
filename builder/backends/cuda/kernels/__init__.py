"""Kernels: sources, compilation, and single ops run on a GPU."""
