"""Registers the creators that an engine's plugin nodes ask for, once a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.tensorrt.plugin import OpenGpu, plugin_classes
from specbuild.runtime.executors.tensorrt.plugin_record import (
    NAME_PREFIX,
    NAMESPACE,
    RECORD_FORMAT,
)

# A registry holds a creator by its address alone: these live as long as the process.
_creators: dict[tuple[str, str, str], Any] = {}


def register_creators(trt: Any, plugins: Mapping[str, str], open_gpu: OpenGpu) -> None:
    """Makes plugins, versions by name, known to TensorRT.

    A creator is made of data alone, so that one serves all engines. Raises UnsupportedHereError
    where the registry has a creator of this name from elsewhere.
    """
    registry = trt.get_plugin_registry()
    for name, version in plugins.items():
        key = (trt.__name__, name, version)
        if key in _creators:
            continue
        _, creator_class = plugin_classes(trt)
        creator = creator_class()
        creator.set_up(name, version, open_gpu)
        if not registry.register_creator(creator, NAMESPACE):
            raise UnsupportedHereError(
                f"TensorRT knows another plugin {NAMESPACE}::{name} {version} already; load the "
                "engine in a process of its own"
            )
        _creators[key] = creator


def creatable(plugins: Mapping[str, str]) -> dict[str, str]:
    """The version, by name, that this runtime could create of an engine's plugins.

    It knows no op: every plugin of its record format is made of the engine's own data.
    """
    known = {}
    for name, version in plugins.items():
        if name.startswith(NAME_PREFIX):
            same = version.partition(".")[0] == str(RECORD_FORMAT)
            known[name] = version if same else f"{RECORD_FORMAT}.*"
    return known
