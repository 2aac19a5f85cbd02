"""The declaration of an op: named axes, attributes, aliases, and its executable reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic, Unsupported
from specbuild.plugins_cuda.traffic import NoTraffic, Routing, TrafficOf

if TYPE_CHECKING:
    import torch

DOMAIN = "specbuild"
OPSET_VERSION = 1

# Type letters of a declaration. "T" is the activation type of the graph, "W" a stored weight, "C"
# the element type of a cache: the activation type, or fp8.
TYPE_NAMES: Mapping[str, tuple[str, ...]] = {
    "T": ("float", "float16", "bfloat16"),
    "C": ("uint8", "float", "float16", "bfloat16"),
    "W": ("uint8", "int32", "float", "float16", "bfloat16"),
    "float32": ("float",),
    "int32": ("int32",),
}


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, its type letter and its axes by name.

    Tensors of one declaration that share an axis name share the size of that axis. A digit is a
    fixed size. ``rank_free`` inputs (weights whose rank depends on their format) name no axes.

    ``body_axes`` is the axis order of a pool in the standard-ONNX body, if it differs from the
    portable order. The lowering selects the inner order of a pool.
    """

    name: str
    dtype: str
    axes: tuple[str, ...] = ()
    optional: bool = False
    rank_free: bool = False
    body_axes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in TYPE_NAMES:
            raise ValueError(f"{self.name}: unknown type letter {self.dtype!r}")
        if self.body_axes is not None and sorted(self.body_axes) != sorted(self.axes):
            raise ValueError(f"{self.name}: body_axes {self.body_axes} permute other axes")

    @property
    def body_permutation(self) -> tuple[int, ...] | None:
        """The transposition from portable to body order, or None if they are equal."""
        if self.body_axes is None:
            return None
        return tuple(self.axes.index(axis) for axis in self.body_axes)


@dataclass(frozen=True)
class AttributeSpec:
    """One attribute; it is required if ``default`` is None."""

    name: str
    type: type[int] | type[float] | type[str]
    default: int | float | str | None = None


@dataclass(frozen=True)
class OpSpec:
    """A ``specbuild::`` op, version 1: the only description of it that backends use.

    ``reference`` takes the inputs in order (None for an absent optional one) and the attributes as
    keywords. It returns a tensor or a tuple of tensors, and never changes its arguments.
    ``aliases`` pairs outputs with inputs: the lowering writes these in place, the reference copies.

    ``body`` builds the same computation of standard ONNX ops (see ``body.py``). ``weighted_body``
    is an optional variant that is faster on a CPU. It needs its weights in another form, which it
    derives when an engine is built. Ops that only passes of the CUDA backend create have no body.

    ``lower`` returns the launches that compute the op on a GPU. ``tactics`` returns the candidates
    that ``tune`` measures for a request, the default first. ``refusal`` returns the reason why no
    kernel supports a request if a build has an alternative, such as smaller prompt chunks;
    ``lower`` raises SpecbuildError with the same reason. ``traffic`` is required with ``lower``:
    the bytes and operations of a call, or the reason why they are negligible. ``routing`` locates
    the router logits of an op with experts.

    ``contribution`` belongs to ops that exchange data between ranks. It takes the arguments of
    ``reference`` and returns the data that this rank sends. ``reference`` then also takes
    ``contributions``, those of all ranks in order, and returns the outputs of one rank.
    """

    name: str
    doc: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[AttributeSpec, ...]
    reference: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    body: Callable[..., Any] | None = None
    weighted_body: Callable[..., Any] | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    lower: Callable[[LoweringRequest], Lowering] | None = None
    tactics: Callable[[LoweringRequest], tuple[Tactic, ...]] | None = None
    refusal: Callable[[LoweringRequest], Unsupported | None] | None = None
    traffic: TrafficOf | NoTraffic | None = None
    routing: Routing | None = None
    contribution: Callable[..., torch.Tensor] | None = None

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in (*self.inputs, *self.outputs)]
        names += [attribute.name for attribute in self.attributes]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: a name is declared twice in {names}")
        for output_name, input_name in self.aliases:
            output = self.tensor(output_name)
            source = self.tensor(input_name)
            if (output.dtype, output.axes) != (source.dtype, source.axes):
                raise ValueError(f"{self.name}: alias {output_name} differs from {input_name}")

    def tensor(self, name: str) -> TensorSpec:
        """Return the input or output of this name; KeyError if there is none."""
        for tensor in (*self.inputs, *self.outputs):
            if tensor.name == name:
                return tensor
        raise KeyError(f"{self.name} has no tensor {name!r}")

    def lowered(self, request: LoweringRequest) -> Lowering | Unsupported:
        """Return the launches, or why no kernel supports the request; other errors raise as in
        ``lower``.
        """
        if self.lower is None:
            raise AssertionError(f"{self.name} has no CUDA lowering")
        refusal = None if self.refusal is None else self.refusal(request)
        return self.lower(request) if refusal is None else refusal

    def complete(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes with defaults filled in; ValueError for unknown or missing ones."""
        known = {attribute.name: attribute for attribute in self.attributes}
        unknown = sorted(set(attributes) - set(known))
        if unknown:
            raise ValueError(f"{self.name}: unknown attributes {unknown}, known {sorted(known)}")
        filled: dict[str, Any] = {}
        for name, attribute in known.items():
            value = attributes.get(name, attribute.default)
            if value is None:
                raise ValueError(f"{self.name}: attribute {name!r} is required")
            filled[name] = attribute.type(value)
        return filled
