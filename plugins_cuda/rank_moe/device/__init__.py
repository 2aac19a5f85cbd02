"""Device code of this op alone: CUDA headers, and no Python."""
