"""Weights that a checkpoint stores quantized keep their codes, where kernels decode them.

A kernel decodes a code to the bf16 number that the weight has when it is dequantized. An engine
with codes thus computes the same bits as one with bf16 weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import JoinedRows, joined_rows
from specbuild.builder.checkpoint.quantization.tensor import QuantizedForm, QuantizedTensor
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.graph.passes.weights import Recipe, recipe_of, weight_value
from specbuild.plugins_cuda.linear.codec import (
    BLOCK_MINIMUM,
    BLOCK_SCALE,
    MINIMUM,
    SCALE,
    ZERO,
    CodeForm,
    GroupedCodes,
    GroupPart,
)
from specbuild.plugins_cuda.linear.group_codes import (
    aligned_parts,
    code_storage,
    codec_of,
    pack_codes,
)
from specbuild.plugins_cuda.linear.storage import Storage
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.quantized import QuantizedForm as StoredForm
from specbuild.runtime.engine_dir.quantized import QuantizedProducts

Sources = tuple[str, ...]
# Ops whose kernels decode them, by the weight.
_WEIGHTS = {
    "Linear": "weight",
    "RmsHead": "weight",
    "RmsQkvRope": "weight",
    "RmsSwiglu": "gate_up",
}
# Of these codes kernels have zero points, of others none.
_FEW_BITS = 4
_NO_PRODUCT = "the op that reads it has no kernel for codes"
_MIXED = "it shares a launch with weights of another type"


@dataclass
class KeptCodes:
    """The weights of a checkpoint by their type: those in which storage, or why in bf16.

    A weight is named by the tensors that it was read from. ``bf16_head`` is why the head is stored
    in bf16, empty where it may have codes.
    """

    bf16_head: str = ""
    stored: dict[tuple[str, Storage], set[Sources]] = field(default_factory=dict)
    dequantized: dict[tuple[str, str], set[Sources]] = field(default_factory=dict)

    def add(self, recipes: Iterable[Recipe], found: Storage | str) -> None:
        """Count weights that are stored so, or in bf16 for this reason."""
        for recipe in recipes:
            if recipe.quantized is None:
                continue
            name = recipe.quantized.form.name
            if isinstance(found, str):
                self.dequantized.setdefault((name, found), set()).add(recipe.sources)
            else:
                self.stored.setdefault((name, found), set()).add(recipe.sources)

    def record(self, tensors: Iterable[SourceTensor]) -> QuantizedProducts | None:
        """What the manifest states of a checkpoint's weights, None where none is quantized.

        ``tensors`` are all of them: no op of :func:`keep_codes` reads those that are not counted.
        """
        counted: set[Sources] = set().union(*self.stored.values(), *self.dequantized.values())
        for tensor in tensors:
            if tensor.quantized is not None and tensor.sources not in counted:
                key = tensor.quantized.form.name, _NO_PRODUCT
                self.dequantized.setdefault(key, set()).add(tensor.sources)
        forms = [
            StoredForm(
                name, len(weights), bits=codec_of(storage).bits, block=codec_of(storage).columns
            )
            for (name, storage), weights in self.stored.items()
        ]
        forms += [
            StoredForm(name, len(weights), dequantized=reason)
            for (name, reason), weights in self.dequantized.items()
        ]
        if not forms:
            return None
        ordered = sorted(forms, key=lambda form: (-form.weights, form.type))
        return QuantizedProducts("bf16", tuple(ordered))


def keep_codes(model: ir.Model, *, kept: KeptCodes) -> int:
    """Packed weights whose codes kernels decode become these codes; how many there are."""
    graph, changed = model.graph, 0
    for node in graph:
        name = _WEIGHTS.get(node.op_type)
        if name is None:
            continue
        index = [tensor.name for tensor in op_named(node.op_type).inputs].index(name)
        weight = node.inputs[index]
        rows = joined_rows(weight)
        if weight is None or rows is None:
            continue
        found = _storage(rows.recipes)
        if node.op_type == "RmsHead" and kept.bf16_head:
            found = kept.bf16_head
        kept.add(rows.recipes, found)
        if isinstance(found, str):
            continue
        coded = f"{weight.name}.{found.name}"
        if coded not in graph.initializers:
            made = weight_value(coded, _coded(recipe_of(weight), rows, found))
            graph.register_initializer(made)
        node.replace_input_with(index, graph.initializers[coded])
        changed += 1
    return changed


def _storage(recipes: tuple[Recipe, ...]) -> Storage | str:
    """The storage of weights that are packed together, or why they have none."""
    found: set[Storage | str] = {_storage_of(recipe) for recipe in recipes}
    if len(found) == 1:
        return found.pop()
    reasons = [reason for reason in found if isinstance(reason, str)]
    return _MIXED if len(reasons) != 1 else f"{_MIXED}: {reasons[0]}"


def _storage_of(recipe: Recipe) -> Storage | str:
    if recipe.quantized is None:
        return "one is not quantized"
    form = recipe.quantized.form
    if form.has_order:
        return "its groups are no runs of columns"
    return code_storage(code_form(form), recipe.shape[1]) or "no kernel decodes its codes"


def code_form(form: QuantizedForm) -> CodeForm:
    """What decides the storage of a weight."""
    return CodeForm(
        form.code_type, form.bits, form.block, form.scale_dtype,
        has_minima=form.has_minima, has_zero_points=form.has_zero_points,
        has_factors=form.has_factors,
    )  # fmt: skip


def _coded(packed: Recipe | None, rows: JoinedRows, storage: Storage) -> Recipe:
    """The recipe of a packed weight's codes."""
    assert packed is not None
    tiles, blocks, _ = packed.shape
    sources = [recipe.quantized for recipe in rows.recipes if recipe.quantized is not None]

    def load() -> torch.Tensor:
        parts = [aligned_parts(_grouped(source.load()), storage) for source in sources]
        numbers = {
            name: GroupPart(rows.join(*(part.numbers(name) for part in parts)), size)
            for name, size in codec_of(storage).parts.items()
        }
        return pack_codes(
            GroupedCodes(rows.join(*(part.codes for part in parts)), numbers), storage
        )

    shape = (tiles, storage.units(blocks), storage.elements)
    return Recipe(shape, torch.uint8, packed.sources, load)


def _grouped(weight: QuantizedTensor) -> GroupedCodes:
    """The weight; integer codes with zero points are not negative, and all have some."""
    form, codes, zeros = weight.form, weight.codes, weight.zero_points
    scales, columns = _of_rows(weight, weight.scales), form.block[1]
    parts = {SCALE: GroupPart(scales, columns)}
    if weight.minima is not None:
        parts[MINIMUM] = GroupPart(_of_rows(weight, weight.minima), columns)
    if weight.factors is not None:
        of = weight.factors
        parts |= {
            SCALE: GroupPart(of.group_scales.float(), columns),
            BLOCK_SCALE: GroupPart(of.block_scales, of.columns),
        }
        if of.group_minima is not None and of.block_minima is not None:
            parts[MINIMUM] = GroupPart(of.group_minima.float(), columns)
            parts[BLOCK_MINIMUM] = GroupPart(of.block_minima, of.columns)
    elif form.code_type == "int" and form.bits <= _FEW_BITS and weight.minima is None:
        middle = 1 << form.bits - 1 if codes.dtype == torch.int8 else 0
        codes = codes.to(torch.int16) + middle
        zeros = torch.zeros(weight.scales.shape, dtype=torch.int16) if zeros is None else zeros
        parts[ZERO] = GroupPart(_of_rows(weight, zeros + middle), columns)
    return GroupedCodes(codes, parts)


def _of_rows(weight: QuantizedTensor, parts: torch.Tensor) -> torch.Tensor:
    """Numbers of blocks as those of rows, [N, G]."""
    rows = weight.form.block[0]
    return parts if rows == 1 else parts.repeat_interleave(rows, dim=0)[: weight.shape[0]]
