"""Registers the creators that an engine's plugin nodes ask for, once a process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.tensorrt.plugin import OpenGpu, plugin_classes
from specbuild.runtime.executors.tensorrt.plugin_record import NAMESPACE

# A registry holds a creator by its address alone: these live as long as the process.
_creators: dict[tuple[str, str, str], Any] = {}


def register_creators(trt: Any, plugins: Iterable[tuple[str, str]], open_gpu: OpenGpu) -> None:
    """Makes every ``(name, version)`` known to TensorRT.

    A creator is made of data alone, so that one serves all engines. Raises UnsupportedHereError
    where the registry has a creator of this name from elsewhere.
    """
    registry = trt.get_plugin_registry()
    for name, version in plugins:
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


def missing_creators(trt: Any, plugins: Iterable[tuple[str, str]]) -> list[str]:
    """The plugins that no creator is registered for."""
    registry = trt.get_plugin_registry()
    return [
        f"{name} {version}"
        for name, version in plugins
        if registry.get_creator(name, version, NAMESPACE) is None
    ]
