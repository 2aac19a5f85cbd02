"""Replays a plan on an NVIDIA GPU, with cuda-bindings and nothing else."""
