"""Parses an ONNX file without a library, before one opens it.

Returns ports, counts of ops, and every tensor whose values are not in the file: as an initializer,
in an attribute, in a branch or a function, sparse or not. Fields have the numbers of onnx.proto.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from specbuild.runtime.executors.cpu.wire_format import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    Field,
    Fields,
    Schema,
    Span,
    WireError,
    fields_of,
    numbers_of,
    text_of,
)

# The maximum nesting of branches: an engine's graphs have one level.
_MAX_NESTED = 8
_EXTERNAL = 1

_NUMBER, _TEXT, _MANY = Field(VARINT), Field(BYTES), Field(BYTES, repeated=True)
_NUMBERS = Field(VARINT, repeated=True, packed=True)


@dataclass(frozen=True)
class _Message:
    """A kind of message: its fields, and those that may have tensors, with their kind."""

    name: str
    schema: Schema
    holds: Mapping[int, str] = field(default_factory=dict)


_MODEL = {
    **dict.fromkeys((1, 5), _NUMBER),
    **dict.fromkeys((2, 3, 4, 6, 7), _TEXT),
    **dict.fromkeys((8, 14, 20, 25, 26), _MANY),
}
_GRAPH = {**dict.fromkeys((2, 10), _TEXT), **dict.fromkeys((1, 5, 11, 12, 13, 14, 15, 16), _MANY)}
_NODE = {**dict.fromkeys((3, 4, 6, 7, 8), _TEXT), **dict.fromkeys((1, 2, 5, 9, 10), _MANY)}
_ATTRIBUTE = {
    **dict.fromkeys((1, 4, 5, 6, 13, 14, 21, 22), _TEXT),
    **dict.fromkeys((9, 10, 11, 15, 23), _MANY),
    **dict.fromkeys((3, 20), _NUMBER),
    2: Field(FIXED32),
    7: Field(FIXED32, repeated=True, packed=True),
    8: _NUMBERS,
}
_TENSOR = {
    **dict.fromkeys((1, 5, 7, 11), _NUMBERS),
    **dict.fromkeys((2, 14), _NUMBER),
    **dict.fromkeys((3, 8, 9, 12), _TEXT),
    **dict.fromkeys((6, 13, 16), _MANY),
    4: Field(FIXED32, repeated=True, packed=True),
    10: Field(FIXED64, repeated=True, packed=True),
}
_FUNCTION = {
    **dict.fromkeys((1, 8, 10, 13), _TEXT),
    **dict.fromkeys((4, 5, 6, 7, 9, 11, 12, 14), _MANY),
}
_MESSAGES: Mapping[str, _Message] = {
    kind.name: kind
    for kind in (
        _Message("model", _MODEL, {7: "graph", 20: "training", 25: "function"}),
        _Message("training", {1: _TEXT, 2: _TEXT, 3: _MANY, 4: _MANY}, {1: "graph", 2: "graph"}),
        _Message("function", _FUNCTION, {7: "node", 11: "attribute"}),
        _Message("graph", _GRAPH, {1: "node", 5: "tensor", 15: "sparse tensor"}),
        _Message("node", _NODE, {5: "attribute"}),
        _Message(
            "attribute",
            _ATTRIBUTE,
            {
                5: "tensor",
                6: "graph",
                10: "tensor",
                11: "graph",
                22: "sparse tensor",
                23: "sparse tensor",
            },
        ),
        _Message("tensor", _TENSOR),
        _Message("sparse tensor", {1: _TEXT, 2: _TEXT, 3: _NUMBERS}, {1: "tensor", 2: "tensor"}),
    )
}
_PAIR: Schema = {1: _TEXT, 2: _TEXT}
_VALUE: Schema = {1: _TEXT, 2: _TEXT, 3: _TEXT, 4: _MANY}
# Other kinds of types (a sequence, a map) are parsed, but engines have none.
_TYPE: Schema = dict.fromkeys((1, 4, 5, 6, 7, 8, 9), _TEXT)
_TENSOR_TYPE: Schema = {1: _NUMBER, 2: _TEXT}
_SHAPE: Schema = {1: _MANY}
_DIMENSION: Schema = {1: _NUMBER, 2: _TEXT, 3: _TEXT}


@dataclass(frozen=True)
class GraphPort:
    """An input or output: ONNX's number of its element type, and its shape.

    A dimension is a size, the name of a dynamic axis, or None if unspecified. A port that is no
    tensor has element type 0; ``shape`` None is an unknown rank.
    """

    name: str
    element: int
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class ExternalTensor:
    """A tensor whose values are in another file; ``location`` is the graph's description.

    ``nested`` tensors are no initializers of the graph itself, so their values cannot be provided.
    """

    name: str
    element: int
    shape: tuple[int, ...]
    location: Mapping[str, str]
    nested: bool


@dataclass(frozen=True)
class OnnxGraph:
    """The contents of a file: ports of its graph, initializers by name, ops by type.

    Ops of a domain are ``domain::type``; those of branches are not counted.
    """

    inputs: tuple[GraphPort, ...]
    outputs: tuple[GraphPort, ...]
    initializers: tuple[str, ...]
    ops: Mapping[str, int]
    external: tuple[ExternalTensor, ...]


def read_onnx(data: bytes) -> OnnxGraph:
    """Parse the ONNX file in ``data``. Raises WireError if it is invalid."""
    model = fields_of(data, (0, len(data)), _MODEL, "model")
    if 7 not in model:
        raise WireError("it has no graph")
    external: list[ExternalTensor] = []
    graph = fields_of(data, _span(model[7][0]), _GRAPH, "graph")
    ops: Counter[str] = Counter()
    for span in graph.get(1, ()):
        node = fields_of(data, _span(span), _NODE, "node")
        domain, kind = _text(data, node, 7), _text(data, node, 4)
        ops[f"{domain}::{kind}" if domain else kind] += 1
        _look_into(data, _MESSAGES["node"], node, external, 0)
    names = []
    for span in graph.get(5, ()):
        tensor = fields_of(data, _span(span), _TENSOR, "tensor")
        names.append(_text(data, tensor, 8))
        external += _external(data, tensor, nested=False)
    _look_into(data, _MESSAGES["graph"], _only(graph, 15), external, 0)
    _look_into(data, _MESSAGES["model"], _only(model, 20, 25), external, 0)
    return OnnxGraph(
        inputs=tuple(_port(data, _span(value)) for value in graph.get(11, ())),
        outputs=tuple(_port(data, _span(value)) for value in graph.get(12, ())),
        initializers=tuple(names),
        ops=ops,
        external=tuple(external),
    )


def _look_into(
    data: bytes, kind: _Message, fields: Fields, external: list[ExternalTensor], depth: int
) -> None:
    """Collect the external tensors of a message at any depth."""
    if kind.name == "node":
        _check_batch(data, fields)
    for number, inner in kind.holds.items():
        for value in fields.get(number, ()):
            message, below = _MESSAGES[inner], depth + (inner == "graph")
            if below > _MAX_NESTED:
                raise WireError(f"its branches nest deeper than {_MAX_NESTED} levels")
            inner_fields = fields_of(data, _span(value), message.schema, inner)
            if inner == "tensor":
                external += _external(data, inner_fields, nested=True)
            else:
                _look_into(data, message, inner_fields, external, below)


def _check_batch(data: bytes, node: Fields) -> None:
    """Raise WireError for negative batch axes, with which ONNX Runtime reads invalid memory.

    ONNX Runtime checks other attributes, but not this one of GatherND.
    """
    if _text(data, node, 4) != "GatherND":
        return
    for span in node.get(5, ()):
        attribute = fields_of(data, _span(span), _ATTRIBUTE, "attribute")
        if _text(data, attribute, 1) == "batch_dims" and _number(attribute, 3) < 0:
            raise WireError(f"a GatherND has {_number(attribute, 3)} batch axes")


def _external(data: bytes, tensor: Fields, *, nested: bool) -> list[ExternalTensor]:
    """Return the tensor if its values are in another file."""
    location, entries = tensor.get(14, [0])[0], tensor.get(13, [])
    if location == 0 and not entries:
        return []
    name = _text(data, tensor, 8)
    pairs = [fields_of(data, _span(entry), _PAIR, "location") for entry in entries]
    location_fields = {_text(data, pair, 1): _text(data, pair, 2) for pair in pairs}
    if (
        location != _EXTERNAL
        or len(location_fields) < len(pairs)
        or not location_fields.get("location")
    ):
        raise WireError(f"it does not say clearly where tensor {name!r} lies")
    shape = tuple(numbers_of(data, tensor.get(1, [])))
    return [ExternalTensor(name, _number(tensor, 2), shape, location_fields, nested)]


def _port(data: bytes, span: Span) -> GraphPort:
    value = fields_of(data, span, _VALUE, "port")
    name = _text(data, value, 1)
    kind = fields_of(data, _span(value[2][0]), _TYPE, "type") if 2 in value else {}
    if 1 not in kind:
        return GraphPort(name, 0, None)
    tensor = fields_of(data, _span(kind[1][0]), _TENSOR_TYPE, "tensor type")
    if 2 not in tensor:
        return GraphPort(name, _number(tensor, 1), None)
    shape = fields_of(data, _span(tensor[2][0]), _SHAPE, "shape")
    axes = tuple(_axis(data, _span(axis)) for axis in shape.get(1, ()))
    return GraphPort(name, _number(tensor, 1), axes)


def _axis(data: bytes, span: Span) -> int | str | None:
    axis = fields_of(data, span, _DIMENSION, "dimension")
    if 1 in axis and 2 in axis:
        raise WireError("a dimension has a size and a name")
    if 1 in axis:
        return _number(axis, 1)
    return _text(data, axis, 2) if 2 in axis else None


def _only(fields: Fields, *numbers: int) -> Fields:
    return {number: fields[number] for number in numbers if number in fields}


def _text(data: bytes, fields: Fields, number: int) -> str:
    return text_of(data, fields[number][0]) if number in fields else ""


def _number(fields: Fields, number: int) -> int:
    """Return a signed integer, 0 if it is absent."""
    value = fields.get(number, [0])[0]
    assert isinstance(value, int)
    return value - (1 << 64) if value >> 63 else value


def _span(value: int | Span) -> Span:
    assert not isinstance(value, int)
    return value
