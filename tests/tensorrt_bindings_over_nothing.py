"""TensorRT's own Python bindings without its libraries: types, but no computation.

The wheel ``tensorrt-cu13-bindings`` is on PyPI, the libraries it links to are not. The symbols that
it looks up in them return nothing here. Builders and engines cannot be created. Plugins, creators,
fields and descriptions are implemented in Python and can be.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

from specbuild.runtime.executors.tensorrt.check import library_reason

_LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
_LOOKED_UP = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry", "getNvOnnxParserVersion", "getPluginRegistry",
    "initLibNvInferPlugins",
)  # fmt: skip


def bindings_reason() -> str | None:
    """Return the reason the bindings cannot be loaded here, or None."""
    if library_reason("tensorrt") is None:
        return "TensorRT is here with its libraries, and tested itself"
    if importlib.util.find_spec("tensorrt_bindings") is None:
        return "pip install tensorrt-cu13-bindings, for the types of TensorRT's own plugins"
    return None


def load_bindings(folder: Path) -> ModuleType:
    """Return the module, with a dictionary as its registry.

    ``folder`` gets the empty libraries.
    """
    bindings = importlib.util.find_spec("tensorrt_bindings")
    assert bindings is not None and bindings.origin is not None
    shared = Path(bindings.origin).with_name("tensorrt.so").read_bytes()
    source = folder / "empty.cpp"
    source.write_text(
        "".join(f'extern "C" void* {name}() {{ return 0; }}\n' for name in _LOOKED_UP)
    )
    for name in _LIBRARIES:
        # The version of the bindings is in the name that they ask for.
        at = shared.index(f"lib{name}.so.".encode())
        wanted = shared[at : shared.index(b"\0", at)].decode()
        made = folder / wanted
        command = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{wanted}", "-o", made, source]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(made))
    module = importlib.import_module("tensorrt_bindings")
    registry = Registry(module)
    module.get_plugin_registry = lambda: registry  # type: ignore[attr-defined]
    return module


class Registry:
    """Replaces TensorRT's registry, which the empty library does not have."""

    def __init__(self, trt: Any) -> None:
        self._trt = trt
        self._creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        assert isinstance(creator, self._trt.IPluginCreatorV3One)
        key = (creator.name, creator.plugin_version, namespace)
        return self._creators.setdefault(key, creator) is creator

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self._creators.get((name, version, namespace))
