"""What one engine is built from, as the process that builds it is told."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class InputShapes:
    """The shapes of a network's input in one profile; of a scalar that sizes others its values."""

    name: str
    least: tuple[int, ...]
    usual: tuple[int, ...]
    most: tuple[int, ...]


@dataclass(frozen=True)
class EngineRequest:
    """One engine. Every path is absolute.

    ``weights`` is a safetensors file that holds the graph's external tensors by name. ``ops`` are
    the graph's node types as (domain, name). ``prepare`` names a function ``module:name`` that is
    called with the library before the graph is parsed (it registers plugins).
    ``compute_capabilities`` is empty where the engine is for the GPU at hand.
    """

    backend: str
    role: str
    graph: str
    weights: str | None
    engine: str
    ops: tuple[tuple[str, ...], ...]
    profiles: tuple[tuple[InputShapes, ...], ...]
    compute_capabilities: tuple[str, ...] = ()
    prepare: str | None = None
    timing_cache: str | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    weight_streaming: bool = False
    aliased_plugins: bool = False


@dataclass(frozen=True)
class Binding:
    """An input or output of a built network; -1 is a dynamic size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_input: bool


@dataclass(frozen=True)
class RoleReport:
    """What the build report says of a role's engine; ``bindings`` are the network's own."""

    engine_bytes: int
    layers: dict[str, int]
    bindings: tuple[Binding, ...]
    profiles: int


@dataclass(frozen=True)
class EngineResult:
    """What was built: by which version, its network's layers by type, its bindings.

    ``peak_anonymous_bytes`` is the most memory that the building process held beyond mapped files,
    ``parsed_anonymous_bytes`` what of it was held before the library began to compile.
    """

    version: str
    engine_bytes: int
    layers: dict[str, int]
    bindings: tuple[Binding, ...]
    profiles: int
    seconds: float
    peak_anonymous_bytes: int
    parsed_anonymous_bytes: int
    compute_capabilities: tuple[str, ...] = field(default=())

    @property
    def report(self) -> RoleReport:
        """The part that the build report holds."""
        return RoleReport(self.engine_bytes, self.layers, self.bindings, self.profiles)
