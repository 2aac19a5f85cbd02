"""Registers the plugin creators of an engine, once per process."""

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

# A registry stores only the address of a creator, so these live as long as the process.
_creators: dict[tuple[str, str, str], Any] = {}


def register_creators(trt: Any, plugins: Mapping[str, str], open_gpu: OpenGpu) -> None:
    """Register plugins, versions by name, with TensorRT.

    A creator consists of data only, so that one serves all engines. Raises UnsupportedHereError if
    the registry has a foreign creator of this name.
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
    """Return the versions, by name, of an engine's plugins that this runtime can create.

    It needs no knowledge of ops: plugins of its record format consist of the engine's own data.
    """
    versions = {}
    for name, version in plugins.items():
        if name.startswith(NAME_PREFIX):
            same = version.partition(".")[0] == str(RECORD_FORMAT)
            versions[name] = version if same else f"{RECORD_FORMAT}.*"
    return versions
