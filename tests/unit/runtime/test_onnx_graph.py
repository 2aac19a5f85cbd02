"""References of an ONNX file to other files, compared with the onnx package; malformed files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, helper

from specbuild.runtime.executors.cpu.onnx_graph import OnnxGraph, read_onnx
from specbuild.runtime.executors.cpu.wire_format import WireError

names = st.text("abc/.é", max_size=4)
sizes = st.integers(0, 2**40)


@st.composite
def tensors(draw: st.DrawFn) -> TensorProto:
    tensor = TensorProto(name=draw(names), data_type=draw(st.integers(0, 23)))
    tensor.dims.extend(draw(st.lists(sizes, max_size=3)))
    kind = draw(st.sampled_from(["external", "raw", "floats", "ints", "strings", "empty"]))
    if kind == "external":
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=draw(names.filter(bool)))
        for key in draw(st.sets(st.sampled_from(["offset", "length", "checksum", "x"]))):
            tensor.external_data.add(key=key, value=draw(names))
    elif kind == "raw":
        tensor.raw_data = draw(st.binary(max_size=200))
    elif kind == "floats":
        tensor.float_data.extend([0.5] * draw(st.integers(0, 40)))
        tensor.double_data.extend([0.5] * draw(st.integers(0, 3)))
    elif kind == "ints":
        tensor.int32_data.extend(draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3)))
        tensor.int64_data.extend(draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)))
    elif kind == "strings":
        tensor.string_data.extend([b"a", b""])
    if draw(st.booleans()):
        tensor.data_location = tensor.data_location
        tensor.doc_string = draw(names)
    return tensor


@st.composite
def attributes(draw: st.DrawFn, depth: int) -> AttributeProto:
    attribute = AttributeProto(name=draw(names), type=draw(st.integers(0, 14)))
    kinds = ["t", "tensors", "sparse", "floats", "ints", "text"] + ["g", "graphs"] * (depth > 0)
    kind = draw(st.sampled_from(kinds))
    if kind == "t":
        attribute.t.CopyFrom(draw(tensors()))
    elif kind == "tensors":
        attribute.tensors.extend(draw(st.lists(tensors(), max_size=2)))
    elif kind == "sparse":
        attribute.sparse_tensor.CopyFrom(draw(sparse_tensors()))
        attribute.sparse_tensors.extend(draw(st.lists(sparse_tensors(), max_size=1)))
    elif kind == "floats":
        attribute.f = 2.0
        attribute.floats.extend([1.0, 2.0])
    elif kind == "ints":
        attribute.i = -1
        attribute.ints.extend([-(2**63), 0, 300])
    elif kind == "text":
        attribute.s = b"\xff"
        attribute.strings.extend([b"a"])
        attribute.ref_attr_name, attribute.doc_string = "r", "d"
        attribute.tp.CopyFrom(helper.make_tensor_type_proto(1, [1]))
    elif kind == "g":
        attribute.g.CopyFrom(draw(graphs(depth - 1)))
    else:
        attribute.graphs.extend(draw(st.lists(graphs(depth - 1), max_size=2)))
    return attribute


@st.composite
def sparse_tensors(draw: st.DrawFn) -> SparseTensorProto:
    return SparseTensorProto(
        values=draw(tensors()), indices=draw(tensors()), dims=draw(st.lists(sizes, max_size=2))
    )


@st.composite
def nodes(draw: st.DrawFn, depth: int) -> NodeProto:
    node = NodeProto(op_type=draw(st.sampled_from(["Add", "If", ""])), domain=draw(names))
    node.input.extend(draw(st.lists(names, max_size=2)))
    node.output.extend(draw(st.lists(names, max_size=2)))
    node.attribute.extend(draw(st.lists(attributes(depth), max_size=2)))
    if draw(st.booleans()):
        node.name, node.doc_string, node.overload = "n", "d", "o"
        node.metadata_props.add(key="k", value="v")
    return node


@st.composite
def ports(draw: st.DrawFn) -> onnx.ValueInfoProto:
    shape = draw(st.none() | st.lists(st.none() | sizes | names, max_size=3))
    return helper.make_tensor_value_info(draw(names), draw(st.integers(0, 23)), shape)


@st.composite
def graphs(draw: st.DrawFn, depth: int) -> GraphProto:
    graph = GraphProto(name=draw(names))
    graph.node.extend(draw(st.lists(nodes(depth), max_size=2)))
    graph.initializer.extend(draw(st.lists(tensors(), max_size=2)))
    graph.sparse_initializer.extend(draw(st.lists(sparse_tensors(), max_size=1)))
    graph.input.extend(draw(st.lists(ports(), max_size=2)))
    graph.output.extend(draw(st.lists(ports(), max_size=2)))
    graph.value_info.extend(draw(st.lists(ports(), max_size=1)))
    return graph


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    model = onnx.ModelProto(ir_version=10, producer_name=draw(names), graph=draw(graphs(2)))
    model.opset_import.add(domain="", version=23)
    if draw(st.booleans()):
        model.metadata_props.add(key="a", value="b")
        model.functions.add(name="f", domain="d").node.extend(draw(st.lists(nodes(1), max_size=1)))
        model.functions[0].attribute_proto.extend(draw(st.lists(attributes(0), max_size=1)))
    if draw(st.booleans()):
        trained = model.training_info.add()
        trained.algorithm.CopyFrom(draw(graphs(0)))
        trained.initialization.CopyFrom(draw(graphs(0)))
    return model


def every_tensor(message: object) -> Iterator[TensorProto]:
    """Return every tensor below a message, by the fields that the package knows."""
    if isinstance(message, TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            repeated = not hasattr(value, "ListFields")
            for inner in value if repeated else [value]:
                yield from every_tensor(inner)


def axis(dimension: onnx.TensorShapeProto.Dimension) -> int | str | None:
    kind = dimension.WhichOneof("value")
    return None if kind is None else getattr(dimension, kind)


def described(values: object) -> list[tuple[str, int, object]]:
    found = []
    for value in values:
        tensor = value.type.tensor_type
        shape = tuple(map(axis, tensor.shape.dim)) if tensor.HasField("shape") else None
        found.append((value.name, tensor.elem_type, shape))
    return found


@settings(max_examples=25, deadline=None)
@given(models())
def test_the_reader_agrees_with_the_onnx_package(model: onnx.ModelProto) -> None:
    found = read_onnx(model.SerializeToString())
    graph = model.graph
    assert [(p.name, p.element, p.shape) for p in found.inputs] == described(graph.input)
    assert [(p.name, p.element, p.shape) for p in found.outputs] == described(graph.output)
    assert list(found.initializers) == [tensor.name for tensor in graph.initializer]
    types = (f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in graph.node)
    assert dict(found.ops) == Counter(types)
    outside = [t for t in every_tensor(model) if t.data_location == TensorProto.EXTERNAL]
    own = [t for t in graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert summary(found, nested=None) == expected(outside)
    assert summary(found, nested=False) == expected(own)


def summary(found: OnnxGraph, *, nested: bool | None) -> Counter[object]:
    return Counter(
        (t.name, t.element, t.shape, tuple(sorted(t.location.items())))
        for t in found.external
        if nested is None or t.nested == nested
    )


def expected(tensors: list[TensorProto]) -> Counter[object]:
    return Counter(
        (
            t.name,
            t.data_type,
            tuple(t.dims),
            tuple(sorted((e.key, e.value) for e in t.external_data)),
        )
        for t in tensors
    )


SOUND = helper.make_model(
    helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["c"])],
        "g",
        [helper.make_tensor_value_info("a", 1, ["T"])],
        [helper.make_tensor_value_info("c", 1, ["T"])],
        [helper.make_tensor("b", 1, [1], [1.0])],
    )
).SerializeToString()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_are_read_or_rejected(data: st.DataObject) -> None:
    """Random bytes, and a valid file with a few bytes changed, cut or inserted."""
    if data.draw(st.booleans()):
        content = bytearray(data.draw(st.binary(max_size=60)))
    else:
        content = bytearray(SOUND)
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(content) - 1))
            content[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        found = read_onnx(bytes(content))
    except WireError as error:
        assert "\n" not in str(error)
        return
    try:
        model = onnx.ModelProto.FromString(bytes(content))
    except DecodeError:
        return  # The damage is in a part that is passed over here.
    # What is read is what the package reads.
    assert [p.name for p in found.inputs] == [v.name for v in model.graph.input]
    assert list(found.initializers) == [t.name for t in model.graph.initializer]


def tag(number: int, wire: int) -> bytes:
    return bytes([number << 3 | wire])


GRAPH = tag(7, 2) + b"\x00"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no graph"),
        (GRAPH + GRAPH, "field 7 twice"),
        (tag(7, 3), "wire type 3"),
        (tag(7, 0) + b"\x00", "wire type 0"),
        (tag(9, 0) + b"\x00", "field 9, which no"),
        (tag(7, 2) + b"\x05", "ends outside"),
        (tag(1, 0) + b"\xff" * 10 + b"\x01", "too many bytes"),
        (tag(1, 0) + b"\xff" * 9 + b"\x02", "more than 64 bits"),
        (b"\xff" * 6, "too many bytes"),
        (tag(7, 2) + b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "ends outside"),
        (tag(7, 2) + b"\x80", "ends outside"),
    ],
)
def test_rejects_encodings_that_no_library_writes(content: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        read_onnx(content)


def model_with(tensor: TensorProto) -> bytes:
    return onnx.ModelProto(graph=GraphProto(initializer=[tensor])).SerializeToString()


def test_rejects_an_ambiguous_location() -> None:
    told = TensorProto(name="w", data_type=1, dims=[1])
    told.external_data.add(key="location", value="/etc/passwd")
    with pytest.raises(WireError, match="clearly where tensor 'w'"):
        read_onnx(model_with(told))
    silent = TensorProto(name="w", data_location=TensorProto.EXTERNAL)
    with pytest.raises(WireError, match="clearly"):
        read_onnx(model_with(silent))
    told.data_location = TensorProto.EXTERNAL
    told.external_data.add(key="location", value="b")
    with pytest.raises(WireError, match="clearly"):
        read_onnx(model_with(told))


def test_branches_have_a_bound() -> None:
    graph = GraphProto(name="g")
    for _ in range(12):
        node = helper.make_node("If", [], [])
        node.attribute.append(helper.make_attribute("then_branch", graph))
        graph = GraphProto(name="g", node=[node])
    with pytest.raises(WireError, match="nest deeper"):
        read_onnx(onnx.ModelProto(graph=graph).SerializeToString())


def test_rejects_negative_batch_axes() -> None:
    """They crash ONNX Runtime 1.31, in the graph itself or in a branch."""
    node = helper.make_node("GatherND", ["a", "b"], ["c"], batch_dims=-(2**31))
    branch = helper.make_node("If", [], [])
    branch.attribute.append(helper.make_attribute("then_branch", GraphProto(node=[node])))
    for nodes in ([node], [branch]):
        with pytest.raises(WireError, match="GatherND has -2147483648 batch axes"):
            read_onnx(onnx.ModelProto(graph=GraphProto(node=nodes)).SerializeToString())
