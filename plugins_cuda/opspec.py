"""What an op declaration is: named axes, attributes, aliases, and its executable reference."""

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

# Type letters of a declaration. "T" is the activation type of the graph, "W" a stored weight,
# "C" what a cache holds: activations, or their fp8 codes.
TYPE_NAMES: Mapping[str, tuple[str, ...]] = {
    "T": ("float", "float16", "bfloat16"),
    "C": ("uint8", "float", "float16", "bfloat16"),
    "W": ("uint8", "float", "float16", "bfloat16"),
    "float32": ("float",),
    "int32": ("int32",),
}


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, its type letter and its axes by name.

    An axis name that stands in several tensors of one declaration has one size. A digit is a
    fixed size. ``rank_free`` inputs (weights whose rank depends on their format) name no axes.

    ``body_axes`` is the order in which the standard-ONNX body wants a pool, where it differs
    from the portable order (the inner order of a pool belongs to the lowering).
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
        """The transposition from portable to body order, or None where they are equal."""
        if self.body_axes is None:
            return None
        return tuple(self.axes.index(axis) for axis in self.body_axes)


@dataclass(frozen=True)
class AttributeSpec:
    """One attribute; ``default`` None means that it must be given."""

    name: str
    type: type[int] | type[float] | type[str]
    default: int | float | str | None = None


@dataclass(frozen=True)
class OpSpec:
    """A ``specbuild::`` op, version 1: everything that any target needs to know of it.

    ``reference`` takes the inputs in order (None for an absent optional one) and the attributes
    as keywords, and returns a tensor or a tuple of tensors. It never changes its arguments:
    where ``aliases`` pairs an output with an input, the lowering writes in place and the
    reference copies.

    ``body`` builds the same computation of standard ONNX ops (see ``body.py``).
    ``weighted_body``, where there is one, is faster on a CPU but wants its weights in another
    form, which it derives when an engine is built.

    ``lower`` gives the launches that compute it on a GPU, ``tactics`` the candidates among which
    ``tune`` chooses for a request (the first is the default). ``refusal`` gives the reason no
    kernel takes a request, where a build can choose another (smaller chunks of a prompt); ``lower``
    raises the same. An op that only a CUDA pass makes has no body. With ``lower`` comes
    ``traffic``: what a call reads and computes, or why that is nothing to speak of. ``routing``:
    where experts are chosen, if they are.

    ``contribution``, of an op that exchanges data between ranks, takes what ``reference`` takes and
    gives what this rank sends. ``reference`` then also takes ``contributions``, those of all ranks
    in order, and returns the outputs of one rank.
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
        """The input or output of this name."""
        for tensor in (*self.inputs, *self.outputs):
            if tensor.name == name:
                return tensor
        raise KeyError(f"{self.name} has no tensor {name!r}")

    def lowered(self, request: LoweringRequest) -> Lowering | Unsupported:
        """The launches, or why no kernel takes the request; other faults raise as in ``lower``."""
        if self.lower is None:
            raise AssertionError(f"{self.name} has no CUDA lowering")
        refused = None if self.refusal is None else self.refusal(request)
        return self.lower(request) if refused is None else refused

    def complete(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes with defaults filled in; refuses unknown and missing ones."""
        known = {attribute.name: attribute for attribute in self.attributes}
        unknown = sorted(set(attributes) - set(known))
        if unknown:
            raise ValueError(f"{self.name}: unknown attributes {unknown}, known {sorted(known)}")
        filled: dict[str, Any] = {}
        for name, attribute in known.items():
            value = attributes.get(name, attribute.default)
            if value is None:
                raise ValueError(f"{self.name}: attribute {name!r} must be given")
            filled[name] = attribute.type(value)
        return filled
