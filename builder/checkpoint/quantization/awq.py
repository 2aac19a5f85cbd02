"""``quant_method: awq``: four-bit codes and zero points for groups of inputs, as AutoAWQ packs."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.module_patterns import by_part, listed
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

CODES, ZEROS, SCALES = "qweight", "qzeros", "scales"
_BITS = 4
_PER_WORD = 8
# The nibble of a word that holds each of its eight columns.
_NIBBLES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
_FIELDS = FieldTable(
    read=frozenset({"group_size", "modules_to_not_convert", "q_group_size"}),
    only={
        "quant_method": ("awq",),
        "bits": (_BITS,),
        "w_bit": (_BITS,),
        "version": ("gemm", "GEMM"),
    },
    inert=frozenset(
        {
            "backend",
            "do_fuse",
            "exllama_config",
            "fuse_max_seq_len",
            "modules_to_fuse",
            "zero_point",
        }
    ),
)


class AwqFormat:
    """Weights of AutoAWQ, version gemm."""

    methods = ("awq",)
    stored: ClassVar[dict[str, str]] = {
        "int4, groups of inputs with zero points (gemm)": "4.16 (groups of 128)",
    }

    def read(self, section: Config, *, strict: bool) -> QuantizationScheme:
        """What ``quantization_config`` says."""
        return QuantizationScheme(
            "awq",
            frozenset({CODES, ZEROS, SCALES}),
            _read,
            by_part(listed(section, "modules_to_not_convert")),
            warnings=check_fields(section, _FIELDS, strict=strict),
        )


def _read(module: str, parts: Parts) -> SourceTensor:
    codes, zeros, scales = required(module, parts, CODES, ZEROS, SCALES)
    columns, words = matrix_shape(codes)
    rows = words * _PER_WORD
    groups = scales.shape[0] if scales.shape else 0
    if codes.dtype != "I32":
        raise misfit(codes, "words (I32)")
    if scales.dtype not in FLOAT_DTYPES or scales.shape != (groups, rows) or columns % groups:
        raise misfit(scales, f"floats for groups of {columns} inputs and {rows} outputs")
    if zeros.dtype != "I32" or zeros.shape != (groups, words):
        raise misfit(zeros, f"packed zero points I32 [{groups}, {words}]")
    block = (1, columns // groups)
    form = QuantizedForm(
        f"int{_BITS}{block_title((rows, columns), block)}",
        "int",
        _BITS,
        block,
        part_bytes(parts),
        has_zero_points=True,
        scale_dtype=scales.dtype,
    )

    def load() -> QuantizedTensor:
        return QuantizedTensor(
            form,
            _unpacked(codes.load()),
            scales.load().float().T.contiguous(),
            zero_points=_unpacked(zeros.load()).to(torch.int16),
        )

    return quantized_weight(module, parts, form, (rows, columns), load)


def _unpacked(words: Tensor) -> Tensor:
    """Codes uint8 [8 · W, R] of words [R, W]."""
    nibbles = unpack_words(words, _BITS, words.shape[1] * _PER_WORD)
    return nibbles.unflatten(1, (-1, _PER_WORD))[:, :, _NIBBLES].flatten(1).T.contiguous()
