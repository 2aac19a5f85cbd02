"""The contract of an op, which every package of ``plugins_cuda`` must satisfy."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import onnx
import pytest
import torch
from forms import forms_of

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.onnx_schema import register_schemas
from specbuild.plugins_cuda.opspec import DOMAIN, OPSET_VERSION, TYPE_NAMES, OpSpec
from specbuild.plugins_cuda.registry import all_ops
from specbuild.plugins_cuda.torch_ops import fake_outputs, torch_op
from specbuild.plugins_cuda.traffic import NoTraffic, Weights

# A finite value instead of NaN: a standard body multiplies invisible rows by 0, and 0 · NaN is NaN.
# The value is so large that any weight above 1e-33 changes the result.
POISON = np.float32(1e30)

OPS = list(all_ops().values())
OP_IDS = [op.name for op in OPS]
Arrays = Sequence[np.ndarray | None]


def cases_of(op: OpSpec) -> tuple[Case, ...]:
    package = op.reference.__module__.rpartition(".")[0]
    cases: tuple[Case, ...] = importlib.import_module(f"{package}.cases").CASES
    return cases


PAIRS = [(op, case) for op in OPS for case in cases_of(op)]
each_op = pytest.mark.parametrize("op", OPS, ids=OP_IDS)
each_case = pytest.mark.parametrize(
    ("op", "case"), PAIRS, ids=[f"{op.name}: {case.name}" for op, case in PAIRS]
)


def inputs_of(op: OpSpec, case: Case) -> Arrays:
    return case.make(np.random.default_rng(crc32(f"{op.name} {case.name}".encode())))


def as_tensors(arrays: Arrays) -> list[torch.Tensor | None]:
    return [None if array is None else torch.from_numpy(array.copy()) for array in arrays]


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def referenced(op: OpSpec, case: Case, arrays: Arrays) -> list[np.ndarray]:
    outputs = op.reference(*as_tensors(arrays), **op.complete(case.attributes))
    return [output.numpy() for output in as_tuple(outputs)]


def assert_agree(
    op: OpSpec, case: Case, results: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> None:
    assert len(results) == len(expected) == len(op.outputs)
    for spec, result, reference in zip(op.outputs, results, expected, strict=True):
        assert (result.shape, result.dtype) == (reference.shape, reference.dtype), spec.name
        defined = case.compare.get(spec.name, np.s_[:])
        actual, desired = result[defined], reference[defined]
        assert np.isfinite(desired).all(), f"{spec.name}: the reference is not finite"
        if desired.dtype == np.int32:
            np.testing.assert_array_equal(actual, desired, err_msg=spec.name)
        else:
            np.testing.assert_allclose(
                actual, desired, atol=case.atol, rtol=case.rtol, err_msg=spec.name
            )


def test_registry_has_the_op_of_every_folder() -> None:
    names = {"Choose", "KvCommit", "KvWrite", "Moe", "PagedTreeAttention"}
    assert names | {"TreeAccept", "TreeExpand", "TreeSelect"} <= set(all_ops())


@each_op
def test_an_op_with_a_kernel_declares_its_traffic_or_a_reason_for_none(op: OpSpec) -> None:
    assert (op.lower is None) == (op.traffic is None)
    if isinstance(op.traffic, NoTraffic):
        assert len(op.traffic.reason.split()) > 3
    if isinstance(op.traffic, Weights):
        for name in (*op.traffic.multiplied, *op.traffic.looked_up):
            assert op.tensor(name) in op.inputs


@each_op
def test_cases_have_distinct_names(op: OpSpec) -> None:
    names = [case.name for case in cases_of(op)]
    assert names
    assert len(set(names)) == len(names)
    outputs = {spec.name for spec in op.outputs}
    assert all(set(case.compare) <= outputs for case in cases_of(op))


@each_op
def test_schema_is_registered_and_equals_the_declaration(op: OpSpec) -> None:
    register_schemas()
    schema = onnx.defs.get_schema(op.name, max_inclusive_version=OPSET_VERSION, domain=DOMAIN)
    assert schema.since_version == OPSET_VERSION
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    assert [(p.name, p.option == optional) for p in schema.inputs] == [
        (t.name, t.optional) for t in op.inputs
    ]
    assert [p.name for p in schema.outputs] == [t.name for t in op.outputs]
    for parameter, tensor in zip(
        (*schema.inputs, *schema.outputs), (*op.inputs, *op.outputs), strict=True
    ):
        assert parameter.types == {f"tensor({name})" for name in TYPE_NAMES[tensor.dtype]}
    kinds = {int: "INT", float: "FLOAT", str: "STRING"}
    registered = {a.name: (a.type.name, a.required) for a in schema.attributes.values()}
    assert registered == {a.name: (kinds[a.type], a.default is None) for a in op.attributes}
    for attribute in op.attributes:
        if attribute.default is not None:
            default = schema.attributes[attribute.name].default_value
            value = onnx.helper.get_attribute_value(default)
            expected = attribute.default
            value = value.decode() if isinstance(value, bytes) else value
            assert (
                value == pytest.approx(expected)
                if isinstance(expected, float)
                else value == expected
            )


def one_node_model(op: OpSpec, case: Case, attributes: dict[str, Any]) -> onnx.ModelProto:
    arrays = inputs_of(op, case)

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return onnx.helper.make_tensor_value_info(name, dtype, array.shape)

    present = [(t.name, a) for t, a in zip(op.inputs, arrays, strict=True) if a is not None]
    results = zip(op.outputs, referenced(op, case, arrays), strict=True)
    names = ["" if a is None else t.name for t, a in zip(op.inputs, arrays, strict=True)]
    outputs = [t.name for t in op.outputs]
    node = onnx.helper.make_node(op.name, names, outputs, domain=DOMAIN, **attributes)
    graph = onnx.helper.make_graph(
        [node], "one", [info(*entry) for entry in present], [info(t.name, a) for t, a in results]
    )
    imports = [onnx.helper.make_opsetid(DOMAIN, OPSET_VERSION), onnx.helper.make_opsetid("", 23)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


@each_op
def test_schema_accepts_the_op_and_rejects_an_unknown_attribute(op: OpSpec) -> None:
    register_schemas()
    case = cases_of(op)[0]
    complete = op.complete(case.attributes)
    model = one_node_model(op, case, complete)
    onnx.checker.check_model(model, check_custom_domain=True)
    wrong = one_node_model(op, case, {**complete, "no_such_attribute": 1})
    with pytest.raises(onnx.checker.ValidationError, match="no_such_attribute"):
        onnx.checker.check_model(wrong, check_custom_domain=True)


@each_op
def test_pools_are_aliased(op: OpSpec) -> None:
    pools = {spec.name for spec in op.outputs if spec.body_axes is not None}
    aliased = {output for output, _ in op.aliases}
    assert pools <= aliased
    # A fused op of the CUDA backend may also keep the state of a step in place.
    assert op.body is None or aliased == pools


@each_op
def test_an_op_has_a_body_or_a_kernel(op: OpSpec) -> None:
    assert op.body is not None or op.lower is not None


@each_case
def test_cases_are_deterministic(op: OpSpec, case: Case) -> None:
    first, second = inputs_of(op, case), inputs_of(op, case)
    assert len(first) == len(op.inputs)
    for spec, left, right in zip(op.inputs, first, second, strict=True):
        assert (left is None) == (right is None)
        assert left is not None or spec.optional, f"{spec.name} may not be absent"
        if left is not None and right is not None:
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right, err_msg=spec.name)


@each_case
def test_inputs_have_declared_types_and_ranks(op: OpSpec, case: Case) -> None:
    kinds = {"float32": {np.float32}, "int32": {np.int32}, "T": {np.float32}}
    for spec, array in zip(op.inputs, inputs_of(op, case), strict=True):
        if array is not None:
            assert array.dtype.type in kinds.get(spec.dtype, {np.uint8, np.float32}), spec.name
            assert spec.rank_free or array.ndim == len(spec.axes), spec.name


@each_case
def test_reference_does_not_change_its_inputs(op: OpSpec, case: Case) -> None:
    arrays = inputs_of(op, case)
    tensors = as_tensors(arrays)
    outputs = as_tuple(op.reference(*tensors, **op.complete(case.attributes)))
    for spec, array, tensor in zip(op.inputs, arrays, tensors, strict=True):
        if array is not None and tensor is not None:
            np.testing.assert_array_equal(tensor.numpy(), array, err_msg=spec.name)
            owned = tensor.untyped_storage().data_ptr()
            assert all(o.untyped_storage().data_ptr() != owned for o in outputs if o.numel())


@each_case
def test_torch_op_is_the_reference(op: OpSpec, case: Case) -> None:
    arrays = inputs_of(op, case)
    outputs = as_tuple(torch_op(op.name)(*as_tensors(arrays), **case.attributes))
    expected = referenced(op, case, arrays)
    for output, array in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output.numpy(), array)


@each_op
def test_torch_op_passes_opcheck(op: OpSpec) -> None:
    case = cases_of(op)[0]
    torch.library.opcheck(
        torch_op(op.name),
        tuple(as_tensors(inputs_of(op, case))),
        dict(case.attributes),
        test_utils=("test_schema", "test_faketensor"),
    )


@each_case
def test_fake_shapes_equal_real_shapes(op: OpSpec, case: Case) -> None:
    arrays = inputs_of(op, case)
    expected = referenced(op, case, arrays)
    given = [spec for spec, array in zip(op.inputs, arrays, strict=True) if array is not None]
    named = {axis for spec in given for axis in spec.axes}
    # Sizes that depend on data are symbols of the shape environment.
    with torch._subclasses.FakeTensorMode(
        shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()
    ) as mode:
        tensors = tuple(
            None if tensor is None else mode.from_tensor(tensor) for tensor in as_tensors(arrays)
        )
        outputs = as_tuple(torch_op(op.name)(*tensors, **case.attributes))
    for spec, output, array in zip(op.outputs, outputs, expected, strict=True):
        assert output.dtype == torch.from_numpy(array).dtype, spec.name
        assert output.ndim == array.ndim, spec.name
        for axis, fake, real in zip(spec.axes, output.shape, array.shape, strict=True):
            assert (axis not in named and isinstance(fake, torch.SymInt)) or fake == real


def test_fake_rejects_an_axis_of_two_sizes() -> None:
    pool, new, slot = torch.zeros(3, 2, 4, 8), torch.zeros(5, 2, 8), torch.zeros(4)
    with pytest.raises(ValueError, match=r"KvWrite\.write_slot: axis T is 4, was 5"):
        fake_outputs(all_ops()["KvWrite"], (pool, new, slot.int()))


@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op, case in PAIRS if op.body is not None],
    ids=[f"{op.name}: {case.name}" for op, case in PAIRS if op.body is not None],
)
def test_every_form_agrees_with_the_reference(op: OpSpec, case: Case) -> None:
    arrays = inputs_of(op, case)
    expected = referenced(op, case, arrays)
    finite = [
        np.where(np.isnan(a), POISON, a) if a is not None and a.dtype == np.float32 else a
        for a in arrays
    ]
    for name, run in forms_of(op, arrays, case.attributes).items():
        results = run(op, finite, case.attributes)
        try:
            assert_agree(op, case, results, expected)
        except AssertionError as difference:
            raise AssertionError(f"form {name!r}: {difference}") from None
