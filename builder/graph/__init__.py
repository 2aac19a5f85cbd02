"""Modules to portable ONNX graphs."""
