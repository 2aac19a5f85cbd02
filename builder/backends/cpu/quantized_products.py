"""Products with quantized weights: Gemm becomes MatMulNBits over the checkpoint's quantized values.

Weights that read the same input form one product, so the input is rounded and summed once. With
``exact`` math the input is split into two rows, ``x = x1 + x2``. x1 is on the int8 grid of each
block, so rounding it has no error. x2 is the remainder, smaller by a factor of 254.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import onnx_ir as ir
import torch

from specbuild.builder.backends.cpu.block_codes import (
    BlockForm,
    block_codes,
    block_form,
    block_minima,
    block_scales,
    block_zero_points,
    column_order,
)
from specbuild.builder.checkpoint.quantization.tensor import QuantizedSource, QuantizedTensor
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.graph.passes.rewriting import attribute, replace
from specbuild.builder.graph.passes.weights import Recipe, derived, recipe_of, weight_value
from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, BodyBuilder, static_size
from specbuild.runtime.engine_dir.quantized import QuantizedForm, QuantizedProducts

# Inputs are rounded to int8 per block. Other levels have no fast kernels for 8-bit weights.
ACCURACY_LEVEL = 4
# The largest quantized input of a block, and a lower bound of the maximum that is divided by it.
_LARGEST_CODE, _MIN_MAXIMUM = 127.0, 1e-30
_NO_PRODUCT = "weights of experts and weights that the graph transforms"


@dataclass
class QuantizedWeights:
    """The number of weights by checkpoint type and form, or by the reason for dequantizing them."""

    stored: dict[tuple[str, BlockForm], set[str]] = field(default_factory=dict)
    dequantized: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def form_of(self, recipe: Recipe) -> BlockForm | None:
        """Count a weight and return its form, or None if it is stored in float32."""
        source = recipe.quantized
        if source is None:
            return None
        form, name = block_form(source.form, recipe.shape[1]), source.form.name
        if isinstance(form, str):
            self.dequantized.setdefault((name, form), set()).update(recipe.sources)
            return None
        self.stored.setdefault((name, form), set()).update(recipe.sources)
        return form

    def add_others(self, tensors: Iterable[SourceTensor]) -> None:
        """Count weights that no product of the graphs reads, such as those of experts."""
        counted = {
            name for group in (*self.stored.values(), *self.dequantized.values()) for name in group
        }
        for tensor in tensors:
            if tensor.quantized is not None and not counted.issuperset(tensor.sources):
                key = tensor.quantized.form.name, _NO_PRODUCT
                self.dequantized.setdefault(key, set()).add(tensor.name)

    def record(self, *, exact: bool) -> QuantizedProducts | None:
        """Return the manifest's record of the weights, or None if none is quantized."""
        forms = [
            QuantizedForm(name, len(weights), bits=form.bits, block=form.size)
            for (name, form), weights in self.stored.items()
        ]
        forms += [
            QuantizedForm(name, len(weights), dequantized=reason)
            for (name, reason), weights in self.dequantized.items()
        ]
        if not forms:
            return None
        ordered = sorted(forms, key=lambda form: (-form.weights, form.type))
        return QuantizedProducts("exact" if exact else "fast", tuple(ordered))


@dataclass(frozen=True)
class _Run:
    """Rows of a product's weight that are stored in one form; None is float32."""

    gemm: int
    form: BlockForm | None
    recipes: tuple[Recipe, ...]

    @property
    def rows(self) -> int:
        return sum(recipe.shape[0] for recipe in self.recipes)


def quantize_products(model: ir.Model, *, exact: bool, statistics: QuantizedWeights) -> int:
    """Rewrite products and embeddings with quantized weights, and return their number."""
    graph = model.graph
    by_input: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "Gemm" and node.inputs[0] is not None and _is_quantized(node, 1):
            by_input.setdefault(node.inputs[0], []).append(node)
    for x, gemms in by_input.items():
        _rewrite_products(graph, x, gemms, exact=exact, statistics=statistics)
    gathers = [node for node in graph if node.op_type == "Gather" and _is_quantized(node, 0)]
    rewritten = sum(_rewrite_gather(graph, node, statistics) for node in gathers)
    return rewritten + sum(map(len, by_input.values()))


def _is_quantized(node: ir.Node, index: int) -> bool:
    """Return whether this input is a quantized weight and the node has default attributes."""
    recipe = recipe_of(node.inputs[index])
    if recipe is None:
        return False
    is_default = attribute(node, "transA", 0) == 0 and attribute(node, "axis", 0) == 0
    is_default = is_default and attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
    is_default = is_default and (node.op_type != "Gemm" or attribute(node, "transB", 0) == 1)
    return is_default and any(part.quantized is not None for part in _parts(recipe))


def _parts(recipe: Recipe) -> tuple[Recipe, ...]:
    return recipe.stacked or (recipe,)


def _rewrite_products(
    graph: ir.Graph,
    x: ir.Value,
    gemms: Sequence[ir.Node],
    *,
    exact: bool,
    statistics: QuantizedWeights,
) -> None:
    runs: list[_Run] = []
    for index, gemm in enumerate(gemms):
        recipe = recipe_of(gemm.inputs[1])
        assert recipe is not None
        formed = [(statistics.form_of(part), part) for part in _parts(recipe)]
        # A weight with permuted groups needs its input columns in the same order.
        for (_, _), pairs in groupby(formed, lambda pair: (pair[0], _order_key(pair[1]))):
            adjacent = list(pairs)
            runs.append(_Run(index, adjacent[0][0], tuple(part for _, part in adjacent)))
    if all(run.form is None for run in runs):
        return
    b = BodyBuilder()
    inputs = _ProductInputs(b, graph, x, exact=exact)
    base = _joined_name([gemm.inputs[1] for gemm in gemms])
    keys = list(dict.fromkeys((run.form, _order_key(run.recipes[0])) for run in runs))
    pieces: dict[int, ir.Value] = {}
    for form, order in keys:
        members = [run for run in runs if (run.form, _order_key(run.recipes[0])) == (form, order)]
        recipes = [recipe for run in members for recipe in run.recipes]
        name = base if len(keys) == 1 else f"{base}.part{keys.index((form, order))}"
        if form is None:
            weight = _weight(graph, name, derived(recipes, lambda *parts: torch.cat(parts)))
            y = b.Gemm(x, weight, transB=1)
        else:
            y = _product(name, inputs, form, recipes)
        sizes = [run.rows for run in members]
        split = (
            [y] if len(members) == 1 else b.Split(y, b.i64(*sizes), outputs=len(members), axis=1)
        )
        pieces |= dict(zip(map(id, members), split, strict=True))
    for index, gemm in enumerate(gemms):
        outputs = [pieces[id(run)] for run in runs if run.gemm == index]
        y = outputs[0] if len(outputs) == 1 else b.Concat(*outputs, axis=1)
        if len(gemm.inputs) > 2 and gemm.inputs[2] is not None:
            y = b.Add(y, gemm.inputs[2])
        y.shape, y.type = gemm.outputs[0].shape, gemm.outputs[0].type
        if index:
            replace(gemm, BodyBuilder(), [y], graph)
        else:
            first = gemm, y
    replace(first[0], b, [first[1]], graph)


class _ProductInputs:
    """The input of a product in the forms that MatMulNBits and block sums read, each cached."""

    def __init__(self, b: BodyBuilder, graph: ir.Graph, x: ir.Value, *, exact: bool) -> None:
        self.b, self.graph, self._x = b, graph, x
        self.exact = exact
        self._cache: dict[tuple[object, ...], ir.Value] = {}

    def ordered(self, name: str, recipe: Recipe) -> ir.Value:
        """Return the input [T, K] with its columns in the order of the weight's groups."""
        source = recipe.quantized
        assert source is not None
        if not source.form.has_order:
            return self._x
        order = Recipe(
            (recipe.shape[1],), torch.int32, recipe.sources,
            lambda: column_order(source.load()).int(),
        )  # fmt: skip
        return self._cached(
            ("order", name),
            lambda: self.b.Gather(self._x, _weight(self.graph, f"{name}.order", order), axis=1),
        )

    def blocks(self, x: ir.Value, size: int) -> ir.Value:
        """Return the input as [T, blocks, size]."""
        columns = static_size(self._x, 1)
        shape = (-1, columns // size, size)
        return self._cached(("blocks", x, size), lambda: self.b.reshape(x, *shape))

    def block_sums(self, x: ir.Value, size: int) -> ir.Value:
        """Return the sum of every block, [T, blocks]."""
        blocks = self.blocks(x, size)
        return self._cached(
            ("sums", x, size), lambda: self.b.ReduceSum(blocks, self.b.i64(2), keepdims=0)
        )

    def two_rows(self, x: ir.Value, size: int) -> ir.Value:
        """Return all rows x1, followed by all rows x2: [2 * T, K]."""
        return self._cached(("rows", x, size), lambda: self._split(x, size))

    def _split(self, x: ir.Value, size: int) -> ir.Value:
        b, blocks = self.b, self.blocks(x, size)
        largest = b.ReduceMax(b.Abs(blocks), b.i64(2), keepdims=1)
        step = b.Mul(b.Max(largest, b.scalar(_MIN_MAXIMUM)), b.scalar(1 / _LARGEST_CODE))
        on_grid = b.Mul(b.Round(b.Div(blocks, step)), step)
        both = b.Concat(on_grid, b.Sub(blocks, on_grid), axis=0)
        return b.reshape(both, -1, static_size(self._x, 1))

    def _cached(self, key: tuple[object, ...], make: Callable[[], ir.Value]) -> ir.Value:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


def _product(
    name: str, inputs: _ProductInputs, form: BlockForm, recipes: Sequence[Recipe]
) -> ir.Value:
    """Return the product of an input and weights of one form, [T, rows of all weights]."""
    b, graph = inputs.b, inputs.graph
    rows, columns = sum(recipe.shape[0] for recipe in recipes), recipes[0].shape[1]
    x = inputs.ordered(name, recipes[0])
    operands = [_stored(graph, f"{name}.codes", recipes, form, block_codes)]
    operands.append(_stored(graph, f"{name}.scales", recipes, form, block_scales))
    if form.has_zero_points:
        operands.append(_stored(graph, f"{name}.zero_points", recipes, form, block_zero_points))
    y: ir.Value = b.MatMulNBits(
        inputs.two_rows(x, form.size) if inputs.exact else x,
        *operands,
        domain=CONTRIB_DOMAIN,
        K=columns,
        N=rows,
        bits=form.bits,
        block_size=form.size,
        accuracy_level=ACCURACY_LEVEL,
    )
    if inputs.exact:
        y = b.ReduceSum(b.reshape(y, 2, -1, rows), b.i64(0), keepdims=0)
    if form.has_block_sums:
        minima = _stored(graph, f"{name}.minima", recipes, form, block_minima)
        y = b.Gemm(inputs.block_sums(x, form.size), minima, y, transB=1)
    return y


def _rewrite_gather(graph: ir.Graph, node: ir.Node, statistics: QuantizedWeights) -> int:
    """Read the rows of an embedding from its quantized values, which a tied head also reads."""
    weight, ids = node.inputs[0], node.inputs[1]
    recipe = recipe_of(weight)
    assert weight is not None and recipe is not None and weight.name is not None
    form = statistics.form_of(recipe)
    if form is None:
        return 0
    name, recipes = weight.name, [recipe]
    b = BodyBuilder()
    codes = _stored(graph, f"{name}.codes", recipes, form, block_codes)
    scales = _stored(graph, f"{name}.scales", recipes, form, block_scales)
    operands = [codes, ids, b.Unsqueeze(scales, b.i64(2))]
    rows: ir.Value = b.GatherBlockQuantized(
        *operands,
        domain=CONTRIB_DOMAIN,
        bits=form.bits,
        block_size=form.size,
        gather_axis=0,
        quantize_axis=2,
    )
    if form.has_block_sums:
        minima = _stored(graph, f"{name}.minima", recipes, form, block_minima)
        rows = b.Add(rows, b.Unsqueeze(b.Gather(minima, ids, axis=0), b.i64(2)))
    replace(node, b, [b.reshape(rows, -1, recipe.shape[1])], graph)
    return 1


def _stored(
    graph: ir.Graph,
    name: str,
    recipes: Sequence[Recipe],
    form: BlockForm,
    part: Callable[[QuantizedTensor, BlockForm], torch.Tensor],
) -> ir.Value:
    """Return one part of the quantized weights, with their rows concatenated."""
    rows = sum(recipe.shape[0] for recipe in recipes)
    blocks = recipes[0].shape[1] // form.size
    code_bytes = form.size * form.bits // 8
    shapes: dict[object, tuple[tuple[int, ...], torch.dtype]] = {
        block_codes: ((rows, blocks, code_bytes), torch.uint8),
        block_zero_points: ((rows, -(-blocks * form.bits // 8)), torch.uint8),
    }
    shape, dtype = shapes.get(part, ((rows, blocks), torch.float32))
    sources = [_source(recipe) for recipe in recipes]
    stacked = Recipe(
        shape=shape,
        dtype=dtype,
        sources=tuple(dict.fromkeys(name for recipe in recipes for name in recipe.sources)),
        load=lambda: torch.cat([part(source.load(), form) for source in sources]),
    )
    return _weight(graph, name, stacked)


def _source(recipe: Recipe) -> QuantizedSource:
    assert recipe.quantized is not None
    return recipe.quantized


def _weight(graph: ir.Graph, name: str, recipe: Recipe) -> ir.Value:
    """Return the initializer of this name, and create it from the recipe if it does not exist."""
    if name not in graph.initializers:
        graph.register_initializer(weight_value(name, recipe))
    return graph.initializers[name]


def _order_key(recipe: Recipe) -> tuple[str, ...]:
    """Return a key that is equal for weights with the same order of columns."""
    source = recipe.quantized
    return recipe.sources if source is not None and source.form.has_order else ()


def _joined_name(weights: Sequence[ir.Value | None]) -> str:
    """Return a combined name: ``layers.4.mlp.gate_proj+up_proj`` for two adjacent weights."""
    names = [weight.name for weight in weights if weight is not None and weight.name is not None]
    if len(names) == 1:
        return names[0]
    stems = [name.removesuffix(".weight").split(".") for name in names]
    shared = 0
    while shared < len(stems[0]) and len({tuple(stem[: shared + 1]) for stem in stems}) == 1:
        shared += 1
    return ".".join([*stems[0][:shared], "+".join(".".join(stem[shared:]) for stem in stems)])
