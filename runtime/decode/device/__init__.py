"""Decoding on CUDA: programs keep the state of all sequences on the device."""
