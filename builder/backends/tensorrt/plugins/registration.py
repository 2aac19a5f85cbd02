"""Makes the plugins known to TensorRT in the process that builds; imports nothing heavy."""

from __future__ import annotations

from typing import Any

from specbuild.builder.backends.tensorrt.plugins.versions import stored_versions
from specbuild.runtime.executors.cuda.driver import open_gpu
from specbuild.runtime.executors.tensorrt.creators import register_creators
from specbuild.runtime.executors.tensorrt.plugin_record import NAME_PREFIX, RECORD_FORMAT


def register_plugins(trt: Any) -> None:
    """Registers every op's creator; their plugins run on the first GPU when TensorRT times them."""
    versions = {
        f"{NAME_PREFIX}{op}": f"{RECORD_FORMAT}.{version}"
        for op, (version, _) in stored_versions().items()
    }
    register_creators(trt, versions, open_gpu)
