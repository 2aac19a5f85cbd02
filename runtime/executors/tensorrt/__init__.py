"""Runs an engine's graphs with TensorRT, their ops by plugins that replay recorded launches."""
