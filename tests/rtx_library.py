"""TensorRT-RTX in tests: needed for what really builds, absent on machines without its wheel."""

from __future__ import annotations

import pytest

from specbuild.runtime.executors.tensorrt.check import library_reason

_LACK = library_reason("tensorrt-rtx")
needs_tensorrt_rtx = pytest.mark.skipif(_LACK is not None, reason=_LACK or "")
