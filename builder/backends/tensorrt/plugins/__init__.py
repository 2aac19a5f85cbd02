"""TensorRT engines whose plugins launch the CUDA kernels."""
