"""Tensor parallelism: fused graphs of one GPU become those of a rank, weights by rank."""
