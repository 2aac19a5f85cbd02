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
from specbuild.plugins_cuda.linear.code_units import UNIT_COLUMNS
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
from specbuild.plugins_cuda.linear.packing import TILE_ROWS, packed_shape
from specbuild.plugins_cuda.linear.storage import Storage
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.quantized import QuantizedForm as StoredForm
from specbuild.runtime.engine_dir.quantized import QuantizedProducts

Sources = tuple[str, ...]
# Ops whose kernels decode them, by the weight.
_WEIGHTS = {
    "Embed": "table",
    "Linear": "weight",
    "RmsHead": "weight",
    "RmsQkvRope": "weight",
    "RmsSwiglu": "gate_up",
}
_NO_PRODUCT = "the op that reads it has no kernel for codes"
_UNKNOWN = "no kernel decodes its codes"
_NO_UNITS = f"its rows are no multiple of {UNIT_COLUMNS} columns, or no multiple of {TILE_ROWS}"
_MIXED = "it shares a launch with weights of another type"


@dataclass
class KeptCodes:
    """The weights of a checkpoint by their type: those in which storage, or why in bf16.

    A weight is named by the tensors that it was read from. ``bf16_head`` is why the head is stored
    in bf16, and ``bf16_table`` why the embedding is; empty where they may have codes.
    """

    bf16_head: str = ""
    bf16_table: str = ""
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
        rows = _joined_rows(weight)
        if weight is None or rows is None:
            continue
        reason = _why_table_is_bf16(node, rows, kept)
        found = reason or _storage(rows.recipes)
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


def _joined_rows(weight: ir.Value | None) -> JoinedRows | None:
    """What a weight's rows are made of: a table that no head shares is one of the checkpoint's."""
    joined, recipe = joined_rows(weight), recipe_of(weight)
    if joined is None and recipe is not None and recipe.quantized is not None:
        return JoinedRows((recipe,), lambda rows: rows)
    return joined


def _why_table_is_bf16(node: ir.Node, rows: JoinedRows, kept: KeptCodes) -> str:
    """Why a head's or an embedding's table has no codes; empty where it may have some."""
    if node.op_type not in ("Embed", "RmsHead"):
        return ""
    vocab, width = rows.recipes[0].shape
    if vocab % TILE_ROWS or width % UNIT_COLUMNS:
        return _NO_UNITS
    return kept.bf16_head if node.op_type == "RmsHead" else kept.bf16_table


def _storage(recipes: tuple[Recipe, ...]) -> Storage | str:
    """The storage of weights that are packed together, or why they have none."""
    forms = [None if recipe.quantized is None else recipe.quantized.form for recipe in recipes]
    reasons = {_why_bf16(form) for form in forms}
    if reasons != {""}:
        [*named] = sorted(reasons - {""})
        return f"{_MIXED}: {named[0]}" if "" in reasons else named[0]
    made = {code_form(form) for form in forms if form is not None}
    found = code_storage(made, recipes[0].shape[1])
    return found or (_UNKNOWN if len(made) == 1 else _MIXED)


def _why_bf16(form: QuantizedForm | None) -> str:
    """Why such a weight has no codes wherever it stands; empty where it may have some."""
    if form is None:
        return "one is not quantized"
    return "its groups are no runs of columns" if form.has_order else ""


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
    in_order = len(packed.shape) == 2
    tiles, blocks = packed_shape(*packed.shape)[:2] if in_order else packed.shape[:2]
    sources = [recipe.quantized for recipe in rows.recipes if recipe.quantized is not None]

    def load() -> torch.Tensor:
        parts = [aligned_parts(_grouped(source.load(), storage), storage) for source in sources]
        numbers = {
            name: GroupPart(rows.join(*(part.numbers(name) for part in parts)), size)
            for name, size in codec_of(storage).parts.items()
        }
        return pack_codes(
            GroupedCodes(rows.join(*(part.codes for part in parts)), numbers), storage
        )

    shape = (tiles, storage.units(blocks), storage.elements)
    return Recipe(shape, torch.uint8, packed.sources, load)


def _grouped(weight: QuantizedTensor, storage: Storage) -> GroupedCodes:
    """The weight; where ``storage`` has zero points, codes are not negative and all have some."""
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
    elif ZERO in codec_of(storage).parts:
        middle = 1 << form.bits - 1 if codes.dtype == torch.int8 else 0
        codes = codes.to(torch.int16) + middle
        zeros = torch.zeros(weight.scales.shape, dtype=torch.int16) if zeros is None else zeros
        parts[ZERO] = GroupPart(_of_rows(weight, zeros + middle), columns)
    return GroupedCodes(codes, parts)


def _of_rows(weight: QuantizedTensor, parts: torch.Tensor) -> torch.Tensor:
    """Numbers of blocks as those of rows, [N, G]."""
    rows = weight.form.block[0]
    return parts if rows == 1 else parts.repeat_interleave(rows, dim=0)[: weight.shape[0]]
