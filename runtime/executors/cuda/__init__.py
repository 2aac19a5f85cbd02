"""Replays a plan on an NVIDIA GPU, with cuda-bindings as its only dependency."""
