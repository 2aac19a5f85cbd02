"""TensorRT-RTX engines of standard ops alone."""
