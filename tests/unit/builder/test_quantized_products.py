"""Products of a CPU engine with quantized weights, against gguf-py and products in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from gguf_files import stored, write_gguf

from specbuild.builder.backends.cpu.quantized_products import QuantizedWeights, quantize_products
from specbuild.builder.checkpoint.gguf.container import read_gguf
from specbuild.builder.checkpoint.gguf.values import quantized_form, read_quantized
from specbuild.builder.checkpoint.quantization.tensor import (
    QuantizedForm,
    QuantizedSource,
    QuantizedTensor,
)
from specbuild.builder.graph.passes.cleanup import remove_unused
from specbuild.builder.graph.passes.portable import portable_proto
from specbuild.builder.graph.passes.weights import Recipe, derive_stacked, recipe_of, weight_value
from specbuild.plugins_cuda.body import BodyBuilder

ROWS, COLUMNS = 24, 512
FLOAT, INT32 = ir.DataType.FLOAT, ir.DataType.INT32
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
EIGHT_BITS = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")


@dataclass(frozen=True)
class Weight:
    """A weight as stored in a checkpoint, and its independently computed values float32 [N, K]."""

    recipe: Recipe
    values: np.ndarray


def of_gguf(folder: Path, kind: str, seed: int = 0, rows: int = ROWS) -> Weight:
    """Return random weights in a GGUF type, with the values of gguf-py."""
    drawn = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))
    file = folder / f"{kind}-{seed}.gguf"
    raw, values = stored(drawn, kind)
    tensor = read_gguf(write_gguf(file, "llama", {}, {"w": raw})).tensors["w"]
    source = QuantizedSource(quantized_form(tensor), lambda: read_quantized(tensor))
    return Weight(recipe_for(f"{kind}-{seed}", values, source), values.numpy())


def recipe_for(name: str, values: torch.Tensor, source: QuantizedSource | None) -> Recipe:
    return Recipe(tuple(values.shape), torch.float32, (name,), lambda: values, source)


def grouped(bits: int, group: int, *, ordered: bool = False) -> Weight:
    """Return values with a zero point for each group, as in AWQ and GPTQ."""
    rng = np.random.default_rng(bits + group)
    codes = rng.integers(0, 1 << bits, (ROWS, COLUMNS))
    scales = rng.uniform(0.01, 0.02, (ROWS, COLUMNS // group)).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, scales.shape)
    of_column = np.arange(COLUMNS) // group
    if ordered:
        of_column = rng.permutation(of_column)
    values = (codes - zeros[:, of_column]).astype(np.float32) * scales[:, of_column]
    form = QuantizedForm(
        f"int{bits} g{group}", "int", bits, (1, group), 0, has_zero_points=True, has_order=ordered
    )
    tensor = QuantizedTensor(
        form,
        torch.from_numpy(codes.astype(np.uint8)),
        torch.from_numpy(scales),
        zero_points=torch.from_numpy(zeros.astype(np.int16)),
        groups=torch.from_numpy(of_column) if ordered else None,
    )
    source = QuantizedSource(form, lambda: tensor)
    return Weight(recipe_for(form.name, torch.from_numpy(values), source), values)


def products(weights: Sequence[Weight], *, exact: bool = False) -> ort.InferenceSession:
    """Return a session with one output for each weight; all products have one input."""
    b = BodyBuilder()
    x = ir.Value(name="x", shape=ir.Shape(["T", COLUMNS]), type=ir.TensorType(FLOAT))
    graph = ir.Graph([x], [], nodes=[], name="g", opset_imports={"": 23, "com.microsoft": 1})
    for place, weight in enumerate(weights):
        value = weight_value(f"layers.0.w{place}.weight", weight.recipe)
        graph.register_initializer(value)
        y = b.Gemm(x, value, transB=1)
        y.name, y.type = f"y{place}", ir.TensorType(FLOAT)
        y.shape = ir.Shape(["T", weight.recipe.shape[0]])
        graph.outputs.append(y)
    graph.extend(b.nodes)
    return rewritten(graph, exact=exact)


def rewritten(graph: ir.Graph, *, exact: bool = False) -> ort.InferenceSession:
    """Return a session of the graph after the pass."""
    model = ir.Model(graph, ir_version=11)
    assert quantize_products(model, exact=exact, statistics=QuantizedWeights()) > 0
    remove_unused(model)
    options = ort.SessionOptions()
    arrays = {n: recipe_of(v) for n, v in model.graph.initializers.items()}
    data = {n: np.ascontiguousarray(r.checked().numpy()) for n, r in arrays.items() if r}
    options.add_external_initializers(
        list(data), [ort.OrtValue.ortvalue_from_numpy(array) for array in data.values()]
    )
    session = ort.InferenceSession(
        portable_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    session.arrays = data  # the session reads them in place
    return session


def multiplied(session: ort.InferenceSession, x: np.ndarray) -> list[np.ndarray]:
    result: list[np.ndarray] = session.run(None, {"x": x})
    return result


def error(result: np.ndarray, values: np.ndarray, x: np.ndarray) -> float:
    """Return the largest error of a product relative to its largest value."""
    reference = x.astype(np.float64) @ values.T.astype(np.float64)
    return float(np.abs(result - reference).max() / np.abs(reference).max())


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("kind", [*FOUR_BITS, *EIGHT_BITS])
def test_products_have_the_values_of_the_file(tmp_path: Path, kind: str, *, exact: bool) -> None:
    """Inputs with a single 1 give single weights, which rounding of activations does not change."""
    weight = of_gguf(tmp_path, kind)
    (result,) = multiplied(products([weight], exact=exact), np.eye(COLUMNS, dtype=np.float32))
    largest = np.abs(weight.values).max()
    bound = 3e-7 if kind in FOUR_BITS else 8e-7
    assert np.abs(result.T - weight.values).max() <= bound * largest


@pytest.mark.parametrize("kind", [*FOUR_BITS, *EIGHT_BITS])
def test_exact_math_has_the_error_of_float32(tmp_path: Path, kind: str) -> None:
    weight = of_gguf(tmp_path, kind)
    x = np.random.default_rng(1).standard_normal((9, COLUMNS)).astype(np.float32)
    x[3, :64], x[5] = 0, 0
    (fast,) = multiplied(products([weight]), x)
    (exact,) = multiplied(products([weight], exact=True), x)
    assert error(exact, weight.values, x) < 4e-5
    assert 1e-3 < error(fast, weight.values, x) < 2e-2
    assert not exact[5].any()


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 64), (4, 32), (3, 64), (8, 128)])
@pytest.mark.parametrize("ordered", [False, True], ids=["in order", "by another order"])
def test_groups_have_zero_points_and_any_order(bits: int, group: int, *, ordered: bool) -> None:
    weight = grouped(bits, group, ordered=ordered)
    (result,) = multiplied(products([weight]), np.eye(COLUMNS, dtype=np.float32))
    assert np.abs(result.T - weight.values).max() <= 8e-7 * np.abs(weight.values).max()


def test_products_of_one_input_are_merged(tmp_path: Path) -> None:
    """Weights of one format are merged; others, float32 weights and biases are separate."""
    plain = np.random.default_rng(3).standard_normal((8, COLUMNS)).astype(np.float32)
    weights = [
        of_gguf(tmp_path, "Q4_K", 1),
        of_gguf(tmp_path, "Q6_K", 2, rows=10),
        of_gguf(tmp_path, "Q4_K", 3, rows=12),
        Weight(recipe_for("plain", torch.from_numpy(plain), None), plain),
    ]
    b = BodyBuilder()
    x = ir.Value(name="x", shape=ir.Shape(["T", COLUMNS]), type=ir.TensorType(FLOAT))
    graph = ir.Graph([x], [], nodes=[], name="g", opset_imports={"": 23, "com.microsoft": 1})
    values = [weight_value(f"layers.0.w{n}.weight", w.recipe) for n, w in enumerate(weights)]
    bias = np.random.default_rng(4).standard_normal(ROWS).astype(np.float32)
    shift = weight_value("layers.0.bias", recipe_for("bias", torch.from_numpy(bias), None))
    for value in (*values, shift):
        graph.register_initializer(value)
    stacked = derive_stacked(graph, "layers.0.stacked", values[1:])
    for name, operands in (("one", [values[0], shift]), ("three", [stacked])):
        y = b.Gemm(x, *operands, transB=1)
        y.name, y.type, y.shape = name, ir.TensorType(FLOAT), ir.Shape(["T", None])
        graph.outputs.append(y)
    graph.extend(b.nodes)
    session = rewritten(graph, exact=True)
    data = np.random.default_rng(5).standard_normal((3, COLUMNS)).astype(np.float32)
    one, three = multiplied(session, data)
    assert error(one - bias, weights[0].values, data) < 4e-5
    assert error(three, np.concatenate([w.values for w in weights[1:]]), data) < 4e-5
    kinds = [node.op_type for node in graph]
    assert kinds.count("MatMulNBits") == 2
    assert kinds.count("ReduceSum") == 3  # the block sums, and both rows of each product


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "Q4_0"])
def test_an_embedding_shares_the_quantized_head(tmp_path: Path, kind: str) -> None:
    weight = of_gguf(tmp_path, kind)
    b = BodyBuilder()
    x = ir.Value(name="x", shape=ir.Shape(["T", COLUMNS]), type=ir.TensorType(FLOAT))
    ids = ir.Value(name="ids", shape=ir.Shape(["T"]), type=ir.TensorType(INT32))
    graph = ir.Graph([x, ids], [], nodes=[], name="g", opset_imports={"": 23, "com.microsoft": 1})
    table = weight_value("embed.weight", weight.recipe)
    graph.register_initializer(table)
    for name, y in (("head", b.Gemm(x, table, transB=1)), ("rows", b.Gather(table, ids))):
        y.name, y.type, y.shape = name, ir.TensorType(FLOAT), ir.Shape(["T", None])
        graph.outputs.append(y)
    graph.extend(b.nodes)
    session = rewritten(graph)
    assert [name for name in session.arrays if name.endswith("codes")] == ["embed.weight.codes"]
    places = np.array([5, 0, ROWS - 1, 5], np.int32)
    one = np.eye(COLUMNS, dtype=np.float32)[:4]
    head, rows = session.run(None, {"x": one, "ids": places})
    np.testing.assert_allclose(rows, weight.values[places], rtol=0, atol=1e-6)
    np.testing.assert_allclose(head, weight.values[:, :4].T, rtol=0, atol=4e-6)


def test_fp8_weights_are_dequantized_and_reported() -> None:
    form = QuantizedForm("fp8 128x128", "e4m3", 8, (128, 128), 0)
    values = torch.ones(ROWS, COLUMNS)
    codes = values.to(torch.float8_e4m3fn)
    tensor = QuantizedTensor(form, codes, torch.ones(1, 4))
    result = QuantizedWeights()
    recipe = recipe_for("w", values, QuantizedSource(form, lambda: tensor))
    assert result.form_of(recipe) is None
    ((name, reason),) = result.dequantized
    assert name == "fp8 128x128" and "FP8" in reason
