"""Weights of a graph as recipes: a shape, a type, the source, and the computation.

No weight is held in memory: an initializer has a function that loads it, and a pass that needs
another form replaces it by one with the composed function (law 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch

from specbuild.builder.checkpoint.quantization.tensor import QuantizedSource

_RECIPE = "specbuild.recipe"
ONNX_DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.uint8: ir.DataType.UINT8,
    torch.int8: ir.DataType.INT8,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
}


@dataclass(frozen=True)
class Recipe:
    """The computation of a stored tensor: ``load`` returns it, from checkpoint tensors ``sources``.

    ``quantized`` has the quantized values of a weight that the checkpoint stores quantized.
    ``stacked`` are the recipes whose concatenated rows are the weight; none for other weights. With
    ``ranks`` > 1 the weight is sharded: ``shape`` is that of a rank's part, and ``load`` returns
    the parts of all ranks [ranks, *shape]. ``less_1``: a norm's weight that the checkpoint stores
    minus 1; kernels read it in this form in bf16, and add 1 in fp32. ``experts`` are the recipes of
    single experts' weights [out, in] that were stacked, expert by expert: gate and up, or down.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[str, ...]
    load: Callable[[], torch.Tensor]
    quantized: QuantizedSource | None = None
    stacked: tuple[Recipe, ...] = ()
    ranks: int = 1
    less_1: bool = False
    experts: tuple[Recipe, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor, or of one rank's part if it is sharded."""
        return math.prod(self.shape) * self.dtype.itemsize

    def describes(self, other: Recipe) -> bool:
        """Return whether another graph's recipe of the same name is the same tensor."""
        mine = (self.shape, self.dtype, self.sources, self.ranks)
        return mine == (other.shape, other.dtype, other.sources, other.ranks)

    def checked(self) -> torch.Tensor:
        """Return the tensor, or the parts of all ranks.

        Raises AssertionError if the recipe computes another shape or type than stated.
        """
        tensor = self.load()
        shape = self.shape if self.ranks == 1 else (self.ranks, *self.shape)
        if (tuple(tensor.shape), tensor.dtype) != (shape, self.dtype):
            raise AssertionError(f"{self.sources}: recipe gave {tensor.shape} {tensor.dtype}")
        return tensor


def weight_value(name: str, recipe: Recipe) -> ir.Value:
    """Return an initializer with a recipe."""
    value = ir.Value(name=name)
    set_recipe(value, recipe)
    return value


def set_recipe(value: ir.Value, recipe: Recipe) -> None:
    """Set the recipe of an exported initializer, including its type and shape."""
    assert value.name is not None
    value.const_value = _lazy(value.name, recipe)
    value.type = ir.TensorType(ONNX_DTYPES[recipe.dtype])
    value.shape = ir.Shape(recipe.shape)
    value.meta[_RECIPE] = recipe


def rename_weight(graph: ir.Graph, value: ir.Value, name: str) -> None:
    """Rename an initializer."""
    assert value.name is not None
    del graph.initializers[value.name]
    value.name = name
    graph.initializers[name] = value
    recipe = recipe_of(value)
    if recipe is not None:
        set_recipe(value, recipe)


def bind_weight(graph: ir.Graph, value: ir.Value, recipe: Recipe) -> None:
    """Set the recipe of an exported initializer; its users still get the traced type.

    A checkpoint may store a tensor in another float type than the graph's activations. A Cast is
    then inserted between the two, except before a node that is a Cast itself.
    """
    traced = value.dtype
    assert traced is not None
    users = [(node, index) for node, index in value.uses() if node.op_type != "Cast"]
    set_recipe(value, recipe)
    if value.dtype == traced or not users:
        return
    cast = ir.node("Cast", [value], {"to": traced.value})
    typed = cast.outputs[0]
    typed.name, typed.type, typed.shape = f"{value.name}.cast", ir.TensorType(traced), value.shape
    graph.insert_before(graph[0], cast)
    for node, index in users:
        node.replace_input_with(index, typed)


def recipe_of(value: ir.Value | None) -> Recipe | None:
    """Return the recipe of an initializer, or None if the value is not a weight."""
    return None if value is None else value.meta.get(_RECIPE)


def derive(
    graph: ir.Graph,
    name: str,
    parents: Sequence[ir.Value | None],
    make: Callable[..., torch.Tensor],
) -> ir.Value:
    """Return a new weight ``make(*parents)``; an absent parent is passed as None.

    The shape is computed on the meta device, so ``make`` must be plain torch. If the name exists,
    its weight is returned.
    """
    if name in graph.initializers:
        return graph.initializers[name]
    value = weight_value(name, derived([recipe_of(parent) for parent in parents], make))
    graph.register_initializer(value)
    return value


def derived(recipes: Sequence[Recipe | None], make: Callable[..., torch.Tensor]) -> Recipe:
    """Return the recipe of ``make`` applied to other recipes, as :func:`derive`.

    For a sharded recipe, ``make`` applies to each rank's part.
    """
    ranks = max((recipe.ranks for recipe in recipes if recipe is not None), default=1)

    def load() -> torch.Tensor:
        tensors = [None if recipe is None else recipe.load() for recipe in recipes]
        if ranks == 1:
            return make(*tensors).contiguous()
        sharded = [recipe is not None and recipe.ranks > 1 for recipe in recipes]

        def part(rank: int) -> list[torch.Tensor | None]:
            pairs = zip(tensors, sharded, strict=True)
            return [t[rank] if split and t is not None else t for t, split in pairs]

        return torch.stack([make(*part(rank)) for rank in range(ranks)])

    def meta(recipe: Recipe | None) -> torch.Tensor | None:
        if recipe is None:
            return None
        return torch.empty(recipe.shape, dtype=recipe.dtype, device="meta")

    shape = make(*map(meta, recipes))
    return Recipe(
        shape=tuple(shape.shape),
        dtype=shape.dtype,
        sources=tuple(dict.fromkeys(s for r in recipes if r is not None for s in r.sources)),
        load=load,
        ranks=ranks,
    )


def derive_shards(
    graph: ir.Graph,
    value: ir.Value,
    ranks: int,
    split: Callable[[torch.Tensor], torch.Tensor],
) -> ir.Value:
    """Return a new sharded weight: ``split`` of a tensor returns [ranks, *part].

    The shape is computed on the meta device.
    """
    name, recipe = f"{value.name}.sharded", recipe_of(value)
    assert recipe is not None, value.name
    if name in graph.initializers:
        return graph.initializers[name]
    sharded = weight_value(name, sharded_recipe(recipe, ranks, split))
    graph.register_initializer(sharded)
    return sharded


def sharded_recipe(
    recipe: Recipe, ranks: int, split: Callable[[torch.Tensor], torch.Tensor]
) -> Recipe:
    """Return the recipe of the parts of all ranks, which ``split`` of the tensor returns."""
    parts = split(torch.empty(recipe.shape, dtype=recipe.dtype, device="meta"))
    assert recipe.ranks == 1 and parts.shape[0] == ranks, (recipe.sources, parts.shape)
    load = recipe.load
    return Recipe(
        shape=tuple(parts.shape[1:]),
        dtype=parts.dtype,
        sources=recipe.sources,
        load=lambda: split(load()).contiguous(),
        ranks=ranks,
    )


def derive_stacked(graph: ir.Graph, name: str, parents: Sequence[ir.Value | None]) -> ir.Value:
    """Return a new weight with the concatenated rows of all parents."""
    exists = name in graph.initializers
    value = derive(graph, name, parents, lambda *weights: torch.cat(weights))
    recipes = [recipe_of(parent) for parent in parents]
    if not exists and all(recipe is not None for recipe in recipes):
        stacked = tuple(recipe for recipe in recipes if recipe is not None)
        recipe = recipe_of(value)
        assert recipe is not None
        set_recipe(value, replace(recipe, stacked=stacked))
    return value


def _lazy(name: str, recipe: Recipe) -> ir.LazyTensor:
    return ir.LazyTensor(
        lambda: ir.tensor(recipe.checked().float().numpy()),
        dtype=ONNX_DTYPES[recipe.dtype],
        shape=ir.Shape(recipe.shape),
        name=name,
    )
