"""What kernels of RmsLowRank share."""
