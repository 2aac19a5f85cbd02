"""TensorRT and TensorRT-RTX engines."""
