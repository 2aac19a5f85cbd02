"""The request for building one engine, and the result, as exchanged with the building process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class InputShapes:
    """The shapes of a network input in one profile; for a shape scalar, its values."""

    name: str
    min_shape: tuple[int, ...]
    opt_shape: tuple[int, ...]
    max_shape: tuple[int, ...]


@dataclass(frozen=True)
class EngineRequest:
    """One engine. Every path is absolute.

    ``weights`` is a safetensors file with the graph's external tensors by name. ``ops`` are the
    graph's node types as (domain, name). ``prepare`` names a function ``module:name``, which is
    called with the library before parsing to register plugins. ``compute_capabilities`` is empty
    for the installed GPU.
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
    """A role's engine in the build report; ``bindings`` are those of the TensorRT network."""

    engine_bytes: int
    layers: dict[str, int]
    bindings: tuple[Binding, ...]
    profiles: int


@dataclass(frozen=True)
class EngineResult:
    """A built engine: the library's version, the network's layers by type, and its bindings.

    ``peak_anonymous_bytes`` is the peak memory of the building process, without mapped files.
    ``parsed_anonymous_bytes`` is its memory before the library began to compile.
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
        """Return the part that the build report contains."""
        return RoleReport(self.engine_bytes, self.layers, self.bindings, self.profiles)
