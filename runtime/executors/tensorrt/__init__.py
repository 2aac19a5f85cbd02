"""TensorRT engines: their checks and their execution."""
