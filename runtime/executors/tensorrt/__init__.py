"""TensorRT engines: what they are checked for, and how they run."""
