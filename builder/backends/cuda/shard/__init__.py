"""Tensor parallelism: converts fused graphs for one GPU to those of a rank, and splits weights."""
