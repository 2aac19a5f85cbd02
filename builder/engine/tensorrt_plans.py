"""What the manifest is told of TensorRT's engines once they are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbuild.runtime.engine_dir.manifest import Role, ShapeProfile, TensorRtBuild


@dataclass(frozen=True)
class BuiltPlan:
    """One role's engine: its file, its profiles, and its network's layers by type.

    ``tensors`` are the weights that are inputs of it, none where it holds them.
    """

    file: str
    profiles: tuple[ShapeProfile, ...]
    layers: dict[str, int]
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuiltPlans:
    """All of them, by role, and what built them.

    ``described`` are roles whose graphs the engine does not have: all is said of them already.
    """

    build: TensorRtBuild
    roles: Mapping[str, BuiltPlan]
    described: Mapping[str, Role] = field(default_factory=dict)
