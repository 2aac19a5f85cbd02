"""Keeps weights quantized as in the checkpoint if kernels can dequantize them.

Kernels dequantize to the bf16 number that the weight would have. An engine with quantized weights
thus computes the same bits as one with bf16 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.expert_weights import single_experts
from specbuild.builder.backends.cuda.fusions.fused_node import JoinedRows, joined_rows, static
from specbuild.builder.checkpoint.quantization.tensor import QuantizedForm, QuantizedTensor
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.graph.passes.weights import Recipe, recipe_of, weight_value
from specbuild.plugins_cuda.linear.block_scaled import decoded, mxfp4_blocks, quantised
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
from specbuild.plugins_cuda.linear.packing import BLOCK, TILE_ROWS, pack_rows, packed_shape
from specbuild.plugins_cuda.linear.storage import FP8, MXFP4, Storage
from specbuild.plugins_cuda.moe.expert_weight import expert_weight
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_moe.expert_codes import (
    down_storage,
    pack_down_codes,
    pack_gate_up_codes,
)
from specbuild.plugins_cuda.rms_moe.packing import (
    TILE_OUTPUTS,
    down_steps,
    gate_up_steps,
    pack_down,
    pack_gate_up,
    tile_bytes,
)
from specbuild.runtime.engine_dir.quantized import QuantizedForm as StoredForm
from specbuild.runtime.engine_dir.quantized import QuantizedProducts
from specbuild.runtime.errors import SpecbuildError

Sources = tuple[str, ...]
BLOCK_SCALED = (MXFP4, FP8)
_Pack = Callable[..., torch.Tensor]
_StorageOf = Callable[[Collection[CodeForm], int], Storage | None]
# Ops with dequantizing kernels, and their weight inputs.
_WEIGHTS = {
    "Embed": "table",
    "Linear": "weight",
    "RmsHead": "weight",
    "RmsQkvRope": "weight",
    "RmsSwiglu": "gate_up",
}
# Exponents, as safetensors spells their types.
_POWERS_OF_TWO = ("F8_E8M0", "U8")
_NO_PRODUCT = "the op that reads it has no kernel for quantized weights"
_UNKNOWN = "no kernel dequantizes its format"
_NO_UNITS = f"its shape is not a multiple of {TILE_ROWS} rows and {UNIT_COLUMNS} columns"
_MIXED = "it shares a launch with weights of another type"
_SMALL_SCALE = "{}: a scale is smaller than kernels decode; build with --weights-dtype bf16"
# How an expert is packed in quantized values, and in MXFP4.
_EXPERT_PACKS: dict[str, tuple[_Pack, _Pack]] = {
    "gate_up": (pack_gate_up_codes, pack_gate_up),
    "down": (pack_down_codes, pack_down),
}


@dataclass
class QuantizedWeights:
    """The quantized weights of a checkpoint by type: their storage, or why they are dequantized.

    A weight is identified by its source tensors. ``bf16_head``, ``bf16_table`` and
    ``bf16_experts`` are the reasons to dequantize the head, the embedding and experts; empty if
    they can stay quantized.
    """

    bf16_head: str = ""
    bf16_table: str = ""
    bf16_experts: str = ""
    stored: dict[tuple[str, Storage], set[Sources]] = field(default_factory=dict)
    dequantized: dict[tuple[str, str], set[Sources]] = field(default_factory=dict)

    def add(self, recipes: Iterable[Recipe], result: Storage | str) -> None:
        """Count weights with this storage, or with this reason for dequantizing them."""
        for recipe in recipes:
            if recipe.quantized is None:
                continue
            name = recipe.quantized.form.name
            if isinstance(result, str):
                self.dequantized.setdefault((name, result), set()).add(recipe.sources)
            else:
                self.stored.setdefault((name, result), set()).add(recipe.sources)

    def record(self, tensors: Iterable[SourceTensor]) -> QuantizedProducts | None:
        """Return the manifest's record of a checkpoint's weights, or None if none is quantized.

        ``tensors`` are all weights. Those that were not counted have no op with such kernels.
        """
        counted: set[Sources] = set().union(*self.stored.values(), *self.dequantized.values())
        for tensor in tensors:
            if tensor.quantized is not None and tensor.sources not in counted:
                key = tensor.quantized.form.name, _NO_PRODUCT
                self.dequantized.setdefault(key, set()).add(tensor.sources)
        forms = [
            StoredForm(name, len(weights), bits=bits, block=columns)
            for (name, storage), weights in self.stored.items()
            for bits, columns in (_bits_and_columns(storage),)
        ]
        forms += [
            StoredForm(name, len(weights), dequantized=reason)
            for (name, reason), weights in self.dequantized.items()
        ]
        if not forms:
            return None
        ordered = sorted(forms, key=lambda form: (-form.weights, form.type))
        return QuantizedProducts("bf16", tuple(ordered))


def keep_quantized(model: ir.Model, *, weights: QuantizedWeights) -> int:
    """Replace packed weights by their quantized form if kernels support it. Return the number."""
    graph, changed = model.graph, 0
    for node in graph:
        if node.op_type == "RmsMoe":
            changed += _keep_experts(graph, node, weights)
        name = _WEIGHTS.get(node.op_type)
        if name is None:
            continue
        index = [tensor.name for tensor in op_named(node.op_type).inputs].index(name)
        weight = node.inputs[index]
        rows = _joined_rows(weight)
        if weight is None or rows is None:
            continue
        reason = _why_table_is_bf16(node, rows, weights)
        storage = reason or _storage(rows.recipes)
        weights.add(rows.recipes, storage)
        if isinstance(storage, str):
            continue
        quantized_name = f"{weight.name}.{storage.name}"
        if quantized_name not in graph.initializers:
            recipe = recipe_of(weight)
            assert recipe is not None
            made = (
                _scaled_recipe(recipe, storage)
                if storage in BLOCK_SCALED
                else _quantized_recipe(recipe, rows, storage)
            )
            value = weight_value(quantized_name, made)
            graph.register_initializer(value)
        node.replace_input_with(index, graph.initializers[quantized_name])
        changed += 1
    return changed


def _bits_and_columns(storage: Storage) -> tuple[int, int]:
    """The bits of a code, and the columns that share a scale."""
    if storage in BLOCK_SCALED:
        return (4 if storage is MXFP4 else 8), BLOCK
    return codec_of(storage).bits, codec_of(storage).columns


def _joined_rows(weight: ir.Value | None) -> JoinedRows | None:
    """Return the rows of a weight. An embedding without a head is a single tensor."""
    joined, recipe = joined_rows(weight), recipe_of(weight)
    if joined is None and recipe is not None and recipe.quantized is not None:
        return JoinedRows((recipe,), lambda rows: rows)
    return joined


def _why_table_is_bf16(node: ir.Node, rows: JoinedRows, weights: QuantizedWeights) -> str:
    """Return why a head or an embedding is dequantized; empty if it can stay quantized."""
    if node.op_type not in ("Embed", "RmsHead"):
        return ""
    vocab, width = rows.recipes[0].shape
    if vocab % TILE_ROWS or width % UNIT_COLUMNS:
        return _NO_UNITS
    return weights.bf16_head if node.op_type == "RmsHead" else weights.bf16_table


def _keep_experts(graph: ir.Graph, node: ir.Node, weights: QuantizedWeights) -> int:
    """Do the same for the experts of a layer."""
    declared = [tensor.name for tensor in op_named(node.op_type).inputs]
    inner = static(node.inputs[declared.index("gate_up_bias")], 1) // 2
    storages: dict[str, _StorageOf] = {
        "gate_up": code_storage,
        "down": lambda forms, _: down_storage(forms, inner),
    }
    changed = 0
    for name, storage_of in storages.items():
        weight = node.inputs[declared.index(name)]
        experts = single_experts(weight)
        recipes = tuple(recipe for parts in experts for recipe in parts)
        if weight is None or all(recipe.quantized is None for recipe in recipes):
            continue
        storage = weights.bf16_experts or _storage(recipes, storage_of, (MXFP4,))
        weights.add(recipes, storage)
        if isinstance(storage, str):
            continue
        packs = _EXPERT_PACKS[name]
        recipe = (
            _mxfp4_experts(recipe_of(weight), experts, packs[1])
            if storage is MXFP4
            else _quantized_experts(recipe_of(weight), experts, storage, packs[0])
        )
        value = weight_value(f"{weight.name}.{storage.name}", recipe)
        graph.register_initializer(value)
        node.replace_input_with(declared.index(name), value)
        changed += 1
    return changed


def _quantized_experts(
    packed: Recipe | None,
    experts: tuple[tuple[Recipe, ...], ...],
    storage: Storage,
    pack: _Pack,
) -> Recipe:
    """Return the recipe of packed quantized experts; loading it reads one expert at a time."""
    assert packed is not None
    rows, columns = experts[0][0].shape
    halves = len(experts[0]) == 1  # rows of a tile are halves of a row of down
    units = storage.units(down_steps(columns) if halves else gate_up_steps(columns))
    shape = (len(experts), rows // TILE_OUTPUTS * units, storage.elements)
    dtype: torch.dtype = getattr(torch, storage.dtype)

    def load() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for place, parts in enumerate(experts):
            sources = [recipe.quantized for recipe in parts if recipe.quantized is not None]
            whole[place] = pack(*(_grouped(one.load(), storage) for one in sources), storage)
        return whole

    return Recipe(shape, dtype, packed.sources, load)


def _mxfp4_experts(
    packed: Recipe | None,
    experts: tuple[tuple[Recipe, ...], ...],
    pack: _Pack,
) -> Recipe:
    """The recipe of experts of MXFP4's numbers, as :func:`_scaled_recipe` of dense weights."""
    assert packed is not None
    rows, columns = experts[0][0].shape
    halves = len(experts[0]) == 1
    steps = down_steps(columns) if halves else gate_up_steps(columns)
    shape = (len(experts), rows // TILE_OUTPUTS, tile_bytes(steps))

    def load() -> torch.Tensor:
        whole = torch.empty(shape, dtype=torch.uint8)
        for place, parts in enumerate(experts):
            values = torch.stack([one.load().float() for one in parts], dim=1).flatten(0, 1)
            blocks, scales = mxfp4_blocks(values)
            if not torch.equal(expert_weight(blocks[None], scales[None])[0].T, values):
                raise SpecbuildError(_SMALL_SCALE.format(", ".join(parts[0].sources)))
            whole[place] = pack(blocks[None], scales[None])[0]
        return whole

    return Recipe(shape, torch.uint8, packed.sources, load)


def _storage(
    recipes: tuple[Recipe, ...],
    storage_of: _StorageOf = code_storage,
    block_scaled: tuple[Storage, ...] = BLOCK_SCALED,
) -> Storage | str:
    """Return the storage of weights that are packed together, or why they are dequantized.

    ``block_scaled`` are those of :data:`BLOCK_SCALED` that kernels read.
    """
    forms = [None if recipe.quantized is None else recipe.quantized.form for recipe in recipes]
    reasons = {_why_bf16(form) for form in forms}
    if reasons != {""}:
        [*named] = sorted(reasons - {""})
        return f"{_MIXED}: {named[0]}" if "" in reasons else named[0]
    code_forms = {code_form(form) for form in forms if form is not None}
    storage = block_scaled_storage(code_forms)
    if storage not in block_scaled:
        storage = storage_of(code_forms, recipes[0].shape[1])
    return storage or (_UNKNOWN if len(code_forms) == 1 else _MIXED)


def block_scaled_storage(forms: Collection[CodeForm]) -> Storage | None:
    """The storage of MXFP4's or MXFP8's numbers, whose scales are powers of two."""
    for storage, code_type in ((MXFP4, "e2m1"), (FP8, "e4m3")):
        if all(
            (form.code_type, form.block) == (code_type, (1, BLOCK))
            and form.scale_dtype in _POWERS_OF_TWO
            for form in forms
        ):
            return storage
    return None


def _why_bf16(form: QuantizedForm | None) -> str:
    """Return why no op can keep a weight with this format; empty if one can."""
    if form is None:
        return "one is not quantized"
    return "its groups are not consecutive columns" if form.has_order else ""


def code_form(form: QuantizedForm) -> CodeForm:
    """Return the properties that determine the storage of a weight."""
    return CodeForm(
        form.code_type, form.bits, form.block, form.scale_dtype,
        has_minima=form.has_minima, has_zero_points=form.has_zero_points,
        has_factors=form.has_factors,
    )  # fmt: skip


def _scaled_recipe(packed: Recipe, storage: Storage) -> Recipe:
    """The recipe of a packed weight of MXFP4's or MXFP8's numbers, in bf16, in ``storage``.

    A block may get another scale than the checkpoint's: with the larger codes of its numbers.
    """
    in_order = len(packed.shape) == 2
    tiles, blocks = packed_shape(*packed.shape)[:2] if in_order else packed.shape[:2]

    def load() -> torch.Tensor:
        values = packed.load().to(torch.bfloat16)
        values = pack_rows(values) if in_order else values
        coded = quantised(values, storage)
        if not torch.equal(decoded(coded, blocks * BLOCK, storage), values):
            raise SpecbuildError(_SMALL_SCALE.format(", ".join(packed.sources)))
        return coded

    shape = (tiles, storage.units(blocks), storage.elements)
    return Recipe(shape, torch.uint8, packed.sources, load)


def _quantized_recipe(packed: Recipe, rows: JoinedRows, storage: Storage) -> Recipe:
    """Return the recipe of a packed quantized weight."""
    is_dense = len(packed.shape) == 2
    tiles, blocks = packed_shape(*packed.shape)[:2] if is_dense else packed.shape[:2]
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
    return Recipe(shape, getattr(torch, storage.dtype), packed.sources, load)


def _grouped(weight: QuantizedTensor, storage: Storage) -> GroupedCodes:
    """Return a weight's groups, with zero points and unsigned codes if ``storage`` has them.

    If it has none, those of the weight become minima.
    """
    form, codes, zeros = weight.form, weight.codes, weight.zero_points
    scales, columns = _per_row(weight, weight.scales), form.block[1]
    parts = {SCALE: GroupPart(scales, columns)}
    if weight.minima is not None:
        parts[MINIMUM] = GroupPart(_per_row(weight, weight.minima), columns)
    if weight.factors is not None and BLOCK_SCALE in codec_of(storage).parts:
        factors = weight.factors
        parts |= {
            SCALE: GroupPart(factors.group_scales.float(), columns),
            BLOCK_SCALE: GroupPart(factors.block_scales, factors.columns),
        }
        if factors.group_minima is not None and factors.block_minima is not None:
            parts[MINIMUM] = GroupPart(factors.group_minima.float(), columns)
            parts[BLOCK_MINIMUM] = GroupPart(factors.block_minima, factors.columns)
    elif ZERO in codec_of(storage).parts:
        middle = 1 << form.bits - 1 if codes.dtype == torch.int8 else 0
        codes = codes.to(torch.int16) + middle
        zeros = torch.zeros(weight.scales.shape, dtype=torch.int16) if zeros is None else zeros
        parts[ZERO] = GroupPart(_per_row(weight, zeros + middle), columns)
    elif zeros is not None:
        middle = 0 if codes.dtype == torch.int8 else 1 << form.bits - 1
        codes = codes.to(torch.int16) - middle
        parts[MINIMUM] = GroupPart(_per_row(weight, (middle - zeros) * weight.scales), columns)
    return GroupedCodes(codes, parts)


def _per_row(weight: QuantizedTensor, parts: torch.Tensor) -> torch.Tensor:
    """Repeat values per block to values per row, [N, G]."""
    rows = weight.form.block[0]
    return parts if rows == 1 else parts.repeat_interleave(rows, dim=0)[: weight.shape[0]]
