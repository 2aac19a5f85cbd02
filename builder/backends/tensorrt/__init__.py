"""TensorRT and TensorRT-RTX: compiles the portable graphs with NVIDIA's libraries."""
