"""GatedDelta and its gated norm for CUDA engines; the next launch commits the states."""
