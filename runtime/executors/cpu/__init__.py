"""Engines of ONNX graphs, run on the CPU by ONNX Runtime."""
