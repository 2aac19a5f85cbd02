"""Registers the plugins with TensorRT in the building process; imports only light modules."""

from __future__ import annotations

from typing import Any

from specbuild.builder.backends.tensorrt.plugins.versions import stored_versions
from specbuild.runtime.executors.cuda.driver import open_gpu
from specbuild.runtime.executors.tensorrt.creators import register_creators
from specbuild.runtime.executors.tensorrt.plugin_record import NAME_PREFIX, RECORD_FORMAT


def register_plugins(trt: Any) -> None:
    """Register every op's creator. TensorRT runs the plugins on the first GPU to time them."""
    versions = {
        f"{NAME_PREFIX}{op}": f"{RECORD_FORMAT}.{version}"
        for op, (version, _) in stored_versions().items()
    }
    register_creators(trt, versions, open_gpu)
