"""Decoding on ONNX Runtime and TensorRT: the host calls each graph by its role."""
