"""Passes on small graphs: rewritten nodes, and nodes that must not change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from specbuild.builder.backends.cpu.projections import merge_projections
from specbuild.builder.graph.passes.shapes import (
    cancelled_transposes,
    chained_reshapes,
    constant_reshapes,
)
from specbuild.builder.graph.passes.weights import Recipe, weight_value
from specbuild.plugins_cuda.body import BodyBuilder

HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 8, 16
INT32, FLOAT = ir.DataType.INT32, ir.DataType.FLOAT


def value(name: str, *shape: int | str, dtype: ir.DataType = FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def graph_of(inputs: list[ir.Value], b: BodyBuilder, output: ir.Value) -> ir.Model:
    output.name = "output"
    graph = ir.Graph(inputs, [output], nodes=b.nodes, name="g", opset_imports={"": 23})
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, **feeds: np.ndarray) -> np.ndarray:
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def reshaped(sizes: Callable[[BodyBuilder, ir.Value], list[ir.Value]]) -> ir.Model:
    b, x = BodyBuilder(), value("x", "T", 12)
    return graph_of([x], b, b.Reshape(x, b.Concat(*sizes(b, x), axis=0)))


def with_shape(part: ir.Value, size: int) -> ir.Value:
    part.shape = ir.Shape([size])
    return part


@pytest.mark.parametrize(
    ("sizes", "applied"),
    [
        (lambda b, x: [with_shape(b.size(x, 0), 1), b.i64(3, 4)], 1),
        (lambda b, x: [b.size(x, 0), b.i64(3), b.i64(4)], 1),
        (lambda b, x: [with_shape(b.Shape(x), 2), b.i64(1)], 0),
        (lambda b, x: [b.size(x, 0), b.size(x, 1)], 0),
        (lambda b, x: [b.size(x, 0), b.i64(-1, 4)], 0),
        (lambda b, x: [b.size(x, 0), b.i64(0)], 0),
    ],
    ids=["one size", "three parts", "a part of two sizes", "two sizes", "inferred", "copied"],
)
def test_only_one_computed_size_is_inferred(
    sizes: Callable[[BodyBuilder, ir.Value], list[ir.Value]], applied: int
) -> None:
    x = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32)
    model = reshaped(sizes)
    before = run(model, x=x)
    assert constant_reshapes(model) == applied
    np.testing.assert_array_equal(run(model, x=x), before)


def test_consecutive_reshapes_are_merged() -> None:
    b, x = BodyBuilder(), value("x", "T", 12)
    model = graph_of([x], b, b.reshape(b.reshape(x, -1, 3, 4), -1, 6))
    data = np.random.default_rng(0).standard_normal((4, 12)).astype(np.float32)
    before = run(model, x=data)
    assert chained_reshapes(model) == 1
    np.testing.assert_array_equal(run(model, x=data), before)


def test_a_reshape_with_a_copied_size_is_not_removed() -> None:
    b, x = BodyBuilder(), value("x", "T", 12)
    model = graph_of([x], b, b.reshape(b.reshape(x, -1, 3, 4), 0, 12))
    assert chained_reshapes(model) == 0


@pytest.mark.parametrize(("second", "applied"), [([1, 2, 0], 0), ([2, 0, 1], 1)])
def test_only_inverse_transposes_are_removed(second: list[int], applied: int) -> None:
    b, x = BodyBuilder(), value("x", 2, 3, 4)
    there = b.Transpose(x, perm=[1, 2, 0])
    model = graph_of([x], b, b.Neg(b.Transpose(there, perm=second)))
    data = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    before = run(model, x=data)
    assert cancelled_transposes(model) == applied
    np.testing.assert_array_equal(run(model, x=data), before)


def attention_model(
    *, biased: tuple[bool, bool, bool], inputs: int = 1, trans: int = 1
) -> ir.Model:
    """Return one attention after three projections, as exported and retyped."""
    b = BodyBuilder()
    x, other = value("x", "T", HIDDEN), value("other", "T", HIDDEN)
    cos, sin = value("cos", 32, WIDTH // 2), value("sin", 32, WIDTH // 2)
    positions = value("positions", 1, "T", dtype=ir.DataType.INT64)
    weights = []

    def weight(name: str, *shape: int) -> ir.Value:
        recipe = Recipe(shape, torch.float32, (name,), lambda: torch.zeros(shape))
        weights.append(weight_value(name, recipe))
        return weights[-1]

    def project(name: str, rows: int, has_bias: bool, source: ir.Value) -> ir.Value:
        shape = (rows, HIDDEN) if trans else (HIDDEN, rows)
        parts = [source, weight(f"{name}_proj.weight", *shape)]
        if has_bias:
            parts.append(weight(f"{name}_proj.bias", rows))
        return b.Gemm(*parts, transB=trans)

    def heads_of(flat: ir.Value, heads: int) -> ir.Value:
        split = b.reshape(flat, -1, heads, WIDTH)
        split.shape, split.type = ir.Shape(["T", heads, WIDTH]), ir.TensorType(FLOAT)
        return split

    def rotated(flat: ir.Value, heads: int) -> ir.Value:
        turned = b.RotaryEmbedding(
            b.Unsqueeze(flat, b.i64(0)), cos, sin, positions, num_heads=heads
        )
        return heads_of(turned, heads)

    q = rotated(project("q", HEADS * WIDTH, biased[0], x), HEADS)
    k = rotated(project("k", KV_HEADS * WIDTH, biased[1], x), KV_HEADS)
    v_source = x if inputs == 1 else other
    v = heads_of(project("v", KV_HEADS * WIDTH, biased[2], v_source), KV_HEADS)
    slots = value("slots", "T", dtype=INT32)
    pools = [value(f"{part}_pool", 3, KV_HEADS, 4, WIDTH) for part in "kv"]
    written = [
        b.KvWrite(pool, new, slots, domain="specbuild")
        for pool, new in zip(pools, (k, v), strict=True)
    ]
    attended = b.PagedTreeAttention(q, *written, domain="specbuild")
    graph = ir.Graph(
        [x, other, cos, sin, positions, slots, *pools],
        [attended],
        nodes=b.nodes,
        initializers=weights,
        name="g",
        opset_imports={"": 23, "specbuild": 1},
    )
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    ("options", "applied"),
    [
        ({"biased": (True, True, True)}, 1),
        ({"biased": (False, False, False)}, 1),
        ({"biased": (True, False, False)}, 0),
        ({"biased": (True, True, True), "inputs": 2}, 0),
        ({"biased": (True, True, True), "trans": 0}, 0),
    ],
    ids=["biases", "no biases", "one bias", "two inputs", "weights the other way"],
)
def test_projections_that_one_gemm_cannot_compute_are_not_merged(
    options: dict, applied: int
) -> None:
    model = attention_model(**options)
    assert merge_projections(model) == applied
    joined = [name for name in model.graph.initializers if name.startswith("qkv_proj")]
    expected = ["qkv_proj.weight"] + ["qkv_proj.bias"] * options["biased"][0]
    assert joined == (expected if applied else [])
