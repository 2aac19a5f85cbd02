"""``quant_method: compressed-tensors``, which llm-compressor writes, as for RedHat's models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.module_patterns import Matcher, by_name, listed
from specbuild.builder.checkpoint.quantization.packing import float_scales, unpack_words
from specbuild.builder.checkpoint.quantization.scaled import (
    NVFP4_GROUP,
    SCALE_DTYPES,
    block_of,
    block_title,
    e2m1_weight,
    matrix_shape,
    mxfp4_weight,
    scaled_weight,
)
from specbuild.builder.checkpoint.quantization.scheme import (
    WEIGHT,
    Parts,
    QuantizationScheme,
    misfit,
    part_bytes,
    quantized_weight,
    required,
)
from specbuild.builder.checkpoint.quantization.tensor import (
    Block,
    QuantizedForm,
    QuantizedTensor,
)
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.runtime.errors import SpecbuildError

PACKED, SCALE, ZERO_POINT, ORDER = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
)
GLOBAL_SCALE, SHAPE = "weight_global_scale", "weight_shape"
_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_FIELDS = FieldTable(
    read=frozenset({"config_groups", "ignore", "kv_cache_scheme", "sparsity_config"}),
    only={
        "quant_method": ("compressed-tensors",),
        "format": _FORMATS,
        "quantization_status": ("compressed",),
    },
    inert=frozenset({"global_compression_ratio", "transform_config", "version"}),
)
_NO_SPARSITY = (None, "dense")
_MAX_BITS = 8
_WORD_BITS = 32


@dataclass(frozen=True)
class _Group:
    """The modules of one scheme, by name or by class, and how their weights are stored."""

    is_named: Matcher
    by_class: bool
    bits: int
    block: Block | None
    group_size: int | None
    activations: str


class CompressedTensorsFormat:
    """FP8, W8A8, W4A16, NVFP4, MXFP4 and MXFP8 of llm-compressor."""

    methods = ("compressed-tensors",)
    stored: ClassVar[dict[str, str]] = {
        "FP8 by channel, tensor or block": "8",
        "W8A8: int8, a scale for each row": "8",
        "W4A16, W8A16: int2 to int8, groups, zero points, order": "4.13 (int4, groups of 128)",
        "NVFP4": "4.5",
        "MXFP4, MXFP8": "4.25, 8.25",
    }

    def read(self, section: Config, *, strict: bool) -> QuantizationScheme:
        """What ``quantization_config`` says."""
        warnings = check_fields(section, _FIELDS, strict=strict)
        sparsity = section.section("sparsity_config").text("format")
        if sparsity not in _NO_SPARSITY:
            raise section.wrong("sparsity_config", "no sparsity, which is not implemented")
        if section.section("transform_config").fields.get("config_groups"):
            raise section.wrong("transform_config", "no transforms, which are not implemented")
        fields = section.section("config_groups")
        groups = [_group(fields.section(name)) for name in fields.fields]
        formats = {section.text("format")} | {
            fields.section(name).text("format") for name in fields.fields
        }
        if refused := sorted(str(name) for name in formats - {None, *_FORMATS}):
            raise SpecbuildError(
                f"{fields.where}: format {', '.join(refused)} is not implemented "
                f"(supported: {', '.join(_FORMATS)})"
            )
        activations = sorted({group.activations for group in groups} - {""})
        return QuantizationScheme(
            f"compressed-tensors {section.text('format') or ''}".rstrip(),
            frozenset({PACKED, SCALE, ZERO_POINT, ORDER, GLOBAL_SCALE, SHAPE}),
            partial(_read, section=section, groups=groups),
            by_name(listed(section, "ignore")),
            ", ".join(activations),
            warnings,
            has_weights=any(fields.section(name).get("weights") for name in fields.fields),
        )


def _group(section: Config) -> _Group:
    targets = section.texts("targets")
    weights, inputs = section.section("weights"), section.section("input_activations")
    # A name of a class, as Linear, has neither dots nor an expression.
    by_class = any("." not in target and ":" not in target for target in targets)
    bits = weights.integer("num_bits", _MAX_BITS)
    if bits > _MAX_BITS:
        raise weights.wrong("num_bits", f"at most {_MAX_BITS}")
    structure = weights.integers("block_structure") if weights.get("block_structure") else None
    if structure is not None and (len(structure) != 2 or min(structure) < 1):
        raise weights.wrong("block_structure", "the rows and columns of a block, [128, 128]")
    size = weights.get("group_size")
    return _Group(
        by_name(targets),
        by_class,
        bits,
        None if structure is None else (structure[0], structure[1]),
        weights.integer("group_size") if isinstance(size, int) and size > 0 else None,
        _activations(inputs),
    )


def _activations(inputs: Config) -> str:
    """How inputs are rounded, empty where they are not."""
    if not inputs.fields:
        return ""
    kind = f"{inputs.text('type') or 'int'}{inputs.integer('num_bits', _MAX_BITS)}"
    when = "dynamic" if inputs.get("dynamic") else "static"
    return f"{kind}, {when}, a {inputs.text('strategy') or 'tensor'}"


def _read(module: str, parts: Parts, *, section: Config, groups: Sequence[_Group]) -> SourceTensor:
    if PACKED in parts:
        packed, scale = required(module, parts, PACKED, SCALE)
        if packed.dtype == "I32":
            return _packed_weight(module, parts, _group_of(module, section, groups))
        if packed.dtype != "U8":
            raise misfit(packed, "words (I32) or bytes (U8)")
        if GLOBAL_SCALE in parts:
            return _nvfp4_weight(module, parts)
        return mxfp4_weight(module, parts, packed, scale)
    weight, scale = required(module, parts, WEIGHT, SCALE)
    group = _group_of(module, section, groups)
    if weight.dtype == "F8_E4M3":
        return scaled_weight(module, parts, scale, block=group.block)
    if weight.dtype != "I8":
        raise misfit(weight, "codes (F8_E4M3 or I8): its weights are not compressed")
    return scaled_weight(
        module,
        parts,
        scale,
        block=group.block,
        bits=group.bits,
        zero_points=_plain_zero_points(matrix_shape(weight), scale, parts.get(ZERO_POINT)),
    )


def _group_of(module: str, section: Config, groups: Sequence[_Group]) -> _Group:
    """The module's own group, or the one of its class."""
    found = next((group for group in groups if group.is_named(module)), None)
    found = found or next((group for group in groups if group.by_class), None)
    if found is None:
        raise SpecbuildError(
            f"{section.where}: no entry of config_groups names {module}, which the checkpoint "
            "stores quantized; download the checkpoint again"
        )
    return found


def _plain_zero_points(
    shape: tuple[int, int], scale: SourceTensor, stored: SourceTensor | None
) -> Callable[[], Tensor] | None:
    """Zero points of one byte each, as many as scales."""
    if stored is None:
        return None
    if stored.dtype != "I8" or stored.shape != scale.shape:
        raise misfit(stored, f"a zero point (I8) for each scale, {list(scale.shape)}")
    block = block_of(shape, scale)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return lambda: stored.load().to(torch.int16).reshape(grid)


def _packed_weight(module: str, parts: Parts, group: _Group) -> SourceTensor:
    packed, scale = required(module, parts, PACKED, SCALE)
    rows, words = matrix_shape(packed)
    bits, middle = group.bits, 1 << group.bits - 1
    columns = words * _WORD_BITS // bits
    if group.group_size is not None:
        columns = scale.shape[-1] * group.group_size
    shape = (rows, columns)
    if scale.dtype not in SCALE_DTYPES:
        raise misfit(scale, "floats")
    if -(-columns * bits // _WORD_BITS) != words:
        raise misfit(packed, f"{bits} bits for each of {list(shape)}, by the shape of the scales")
    block = block_of(shape, scale)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    zeros, order = parts.get(ZERO_POINT), parts.get(ORDER)
    form = QuantizedForm(
        f"int{bits}{block_title(shape, block)}",
        "int",
        bits,
        block,
        part_bytes(parts),
        has_zero_points=zeros is not None,
        has_order=order is not None,
        scale_dtype=scale.dtype,
    )
    if order is not None and (order.dtype not in ("I32", "I64") or order.shape != (columns,)):
        raise misfit(order, f"the group (I32) of each of {columns} columns")
    if zeros is not None and zeros.dtype not in ("I32", "I8"):
        raise misfit(zeros, "packed zero points (I32)")

    def load() -> QuantizedTensor:
        _check_shape(parts.get(SHAPE), shape)
        codes = unpack_words(packed.load(), bits, columns)
        if zeros is None:
            codes = (codes.to(torch.int16) - middle).to(torch.int8)
        return QuantizedTensor(
            form,
            codes,
            float_scales(scale.load()).reshape(grid),
            zero_points=None if zeros is None else _zero_points(zeros, bits, grid),
            groups=None if order is None else _groups(order, grid[1]),
        )

    return quantized_weight(module, parts, form, shape, load)


def _zero_points(zeros: SourceTensor, bits: int, grid: tuple[int, int]) -> Tensor:
    """int16 [N, G]: packed along the rows, or a byte each, from the middle of the codes."""
    stored = zeros.load()
    if zeros.dtype == "I8":
        return stored.to(torch.int16).reshape(grid) + (1 << bits - 1)
    if tuple(stored.shape) != (-(-grid[0] * bits // _WORD_BITS), grid[1]):
        raise misfit(zeros, f"{bits} bits for each of {list(grid)}, packed along the rows")
    return unpack_words(stored.T.contiguous(), bits, grid[0]).T.to(torch.int16)


def _groups(order: SourceTensor, count: int) -> Tensor:
    groups = order.load().long()
    # llm-compressor fills it with -1 where the order is that of the columns.
    if int(groups.min()) < 0:
        groups = torch.arange(len(groups)) // -(-len(groups) // count)
    if int(groups.max()) >= count:
        raise misfit(order, f"groups below {count}")
    return groups


def _check_shape(stored: SourceTensor | None, shape: tuple[int, int]) -> None:
    if stored is not None and tuple(stored.load().tolist()) != shape:
        raise misfit(stored, f"the weight's shape {list(shape)}, got {stored.load().tolist()}")


def _nvfp4_weight(module: str, parts: Parts) -> SourceTensor:
    packed, scale, divisor = required(module, parts, PACKED, SCALE, GLOBAL_SCALE)

    def scales() -> tuple[Tensor, Tensor]:
        number = divisor.load().float().reshape(1, 1)
        return float_scales(scale.load()) / number, 1 / number.double()

    return e2m1_weight(
        module,
        parts,
        packed,
        scale,
        group=NVFP4_GROUP,
        scales=scales,
    )
