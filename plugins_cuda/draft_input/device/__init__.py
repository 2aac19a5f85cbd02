"""CUDA headers of this op."""
