"""TensorRT and TensorRT-RTX: the portable graphs as engines of NVIDIA's compiler."""
