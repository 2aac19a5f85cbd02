"""TensorRT-RTX engines of standard ops only."""
