"""The light runtime: loads an engine directory and decodes with it; numpy is all it imports."""

import os

FORMAT_VERSION = 3

# Before anything imports ONNX Runtime, whose official build reports its use otherwise.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
