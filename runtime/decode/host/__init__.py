"""Decoding with graphs that the host calls by role (ONNX Runtime)."""
