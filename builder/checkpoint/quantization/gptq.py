"""``quant_method: gptq``: codes packed along the inputs, zero points, and an order of columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.packing import unpack_words
from specbuild.builder.checkpoint.quantization.scaled import block_title, matrix_shape
from specbuild.builder.checkpoint.quantization.scheme import (
    Parts,
    QuantizationScheme,
    misfit,
    part_bytes,
    quantized_weight,
    required,
)
from specbuild.builder.checkpoint.quantization.tensor import QuantizedForm, QuantizedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor
from specbuild.runtime.errors import SpecbuildError

CODES, ZEROS, SCALES, ORDER = "qweight", "qzeros", "scales", "g_idx"
_BITS = (2, 3, 4, 8)
_WORD_BITS = 32
_V1, _V2 = "gptq", "gptq_v2"
# A pattern of `dynamic` begins with one of these: its modules are excluded, or have other settings.
_SKIPPED, _CHANGED = "-:", "+:"
_FIELDS = FieldTable(
    read=frozenset({"bits", "group_size", "desc_act", "dynamic"}),
    only={
        "quant_method": ("gptq",),
        "checkpoint_format": (_V1, _V2),
        "format": (_V1, _V2),
        "is_marlin_format": (False,),
        "pack_dtype": ("int32",),
    },
    # Fields about the calibration, and kernels.
    inert=frozenset(
        {
            "act_group_aware", "backend", "batch_size", "block_name_to_quantize",
            "cache_block_outputs", "cache_examples_on_gpu", "damp_percent", "dataset",
            "disable_exllama", "exllama_config", "lm_head", "max_input_length", "meta", "method",
            "model_file_base_name", "model_name_or_path", "model_seqlen",
            "module_name_preceding_first_block", "modules_in_block_to_quantize",
            "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16",
            "use_exllama", "hyb_act",
        }
    ),
)  # fmt: skip


@dataclass(frozen=True)
class _Settings:
    """The storage of a module's weights; ``zero_offset`` is added to stored zero points."""

    bits: int
    has_order: bool
    zero_offset: int


class GptqFormat:
    """Weights of AutoGPTQ and GPTQModel, versions 1 and 2."""

    methods = ("gptq",)
    stored: ClassVar[dict[str, str]] = {
        "int2, int3, int4, int8, versions 1 and 2, `desc_act`": "4.16 (int4, groups of 128)",
    }

    def read(self, section: Config, *, strict: bool) -> QuantizationScheme:
        """Read ``quantization_config``."""
        warnings = check_fields(section, _FIELDS, strict=strict)
        stored = section.text("checkpoint_format") or section.text("format") or _V1
        settings = _settings(section, section.fields, 0 if stored == _V2 else 1)
        patterns = _dynamic(section, settings)
        return QuantizationScheme(
            "gptq",
            frozenset({CODES, ZEROS, SCALES, ORDER}),
            partial(_read, settings=settings, patterns=patterns),
            lambda module: any(own is None for p, own in patterns if p.match(module)),
            warnings=warnings,
        )


_Patterns = Sequence[tuple[re.Pattern[str], _Settings | None]]


def _settings(section: Config, fields: dict[str, Any], zero_offset: int) -> _Settings:
    read = Config(section.where, section.label, fields)
    bits = read.integer("bits")
    if bits not in _BITS:
        raise read.wrong("bits", f"one of {', '.join(map(str, _BITS))}")
    return _Settings(bits, read.boolean("desc_act", False), zero_offset)


def _dynamic(section: Config, settings: _Settings) -> _Patterns:
    """Return patterns of modules with their settings, None for excluded ones."""
    found: list[tuple[re.Pattern[str], _Settings | None]] = []
    overrides = section.section("dynamic")
    for name in overrides.fields:
        pattern = name.removeprefix(_SKIPPED).removeprefix(_CHANGED)
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise SpecbuildError(
                f"{overrides.where}: {name!r} is no regular expression ({error}); correct it"
            ) from None
        own = None
        if not name.startswith(_SKIPPED):
            fields = {"bits": settings.bits, "desc_act": settings.has_order}
            changes = overrides.section(name).fields
            own = _settings(overrides, fields | changes, settings.zero_offset)
        found.append((compiled, own))
    return found


def _read(module: str, parts: Parts, *, settings: _Settings, patterns: _Patterns) -> SourceTensor:
    own = next((own for pattern, own in patterns if own and pattern.match(module)), settings)
    codes, zeros, scales = required(module, parts, CODES, ZEROS, SCALES)
    words, rows = matrix_shape(codes)
    columns = words * _WORD_BITS // own.bits
    groups = scales.shape[0] if scales.shape else 0
    if codes.dtype != "I32" or words * _WORD_BITS % own.bits:
        raise misfit(codes, f"words (I32) of {own.bits}-bit codes")
    if scales.dtype not in FLOAT_DTYPES or scales.shape != (groups, rows) or not groups:
        raise misfit(scales, f"floats for groups of {columns} inputs and {rows} outputs")
    if zeros.dtype != "I32" or zeros.shape != (groups, -(-rows * own.bits // _WORD_BITS)):
        raise misfit(zeros, f"packed {own.bits}-bit zero points for {groups} groups of {rows}")
    order = parts.get(ORDER)
    if order is not None and order.shape != (columns,):
        raise misfit(order, f"the group of each of {columns} inputs")
    block = (1, -(-columns // groups))
    form = QuantizedForm(
        f"int{own.bits}{block_title((rows, columns), block)}",
        "int",
        own.bits,
        block,
        part_bytes(parts),
        has_zero_points=True,
        has_order=own.has_order and order is not None,
        scale_dtype=scales.dtype,
    )

    def load() -> QuantizedTensor:
        return QuantizedTensor(
            form,
            unpack_words(codes.load().T.contiguous(), own.bits, columns),
            scales.load().float().T.contiguous(),
            zero_points=_zero_points(zeros.load(), own, rows),
            groups=None if order is None else _groups(order, form, groups),
        )

    return quantized_weight(module, parts, form, (rows, columns), load)


def _zero_points(stored: Tensor, own: _Settings, rows: int) -> Tensor:
    """Return int16 [N, G]; version 1 stores one less, modulo the largest code."""
    zeros = unpack_words(stored, own.bits, rows).T.to(torch.int16) + own.zero_offset
    return (zeros & (1 << own.bits) - 1).contiguous()


def _groups(order: SourceTensor, form: QuantizedForm, count: int) -> Tensor | None:
    groups = order.load().long()
    if torch.equal(groups, torch.arange(len(groups)) // form.block[1]):
        return groups if form.has_order else None
    if not form.has_order:
        raise SpecbuildError(
            f"{order.file}: {order.name} has another order of groups than that of the inputs, but "
            "quantization_config says desc_act false; set it to true"
        )
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise misfit(order, f"groups from 0 to {count - 1}")
    return groups
