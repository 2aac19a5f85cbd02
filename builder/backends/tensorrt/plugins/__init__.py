"""TensorRT engines whose nodes launch the CUDA kernels."""
