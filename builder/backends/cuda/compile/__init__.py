"""Kernel sources to cubins, by NVRTC."""
