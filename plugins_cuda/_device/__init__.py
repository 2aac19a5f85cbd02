"""Device code that the kernels of several ops share: CUDA headers, and no Python."""
