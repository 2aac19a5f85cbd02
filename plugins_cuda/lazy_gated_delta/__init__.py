"""GatedDelta with its gated norm, whose states the next launch commits, for CUDA engines."""
