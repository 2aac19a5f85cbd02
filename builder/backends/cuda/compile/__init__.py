"""Compiles kernel sources to cubins with NVRTC."""
