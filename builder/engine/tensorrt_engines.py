"""The entries of the manifest for TensorRT's engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbuild.runtime.engine_dir.manifest import Role, ShapeProfile, TensorRtBuild


@dataclass(frozen=True)
class TensorRtEngine:
    """One role's engine: its file, its profiles, and its network's layers by type.

    ``tensors`` are the weights among its inputs, none if it stores them.
    """

    file: str
    profiles: tuple[ShapeProfile, ...]
    layers: dict[str, int]
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorRtEngines:
    """All of them, by role, and the library that built them.

    ``described`` are roles without graphs in the engine.
    """

    build: TensorRtBuild
    roles: Mapping[str, TensorRtEngine]
    described: Mapping[str, Role] = field(default_factory=dict)
