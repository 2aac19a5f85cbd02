"""``quant_method: bitsandbytes``: four-bit weights of a table, nf4 or fp4, in flat blocks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config, check_numbers
from specbuild.builder.checkpoint.quantization.module_patterns import by_prefix_or_end, listed
from specbuild.builder.checkpoint.quantization.scheme import (
    WEIGHT,
    Parts,
    QuantizationScheme,
    misfit,
    part_bytes,
    quantized_weight,
    required,
)
from specbuild.builder.checkpoint.quantization.tensor import QuantizedForm, QuantizedTensor
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.runtime.errors import SpecbuildError

SCALES, TABLE = "weight.absmax", "weight.quant_map"
NESTED_SCALES, NESTED_TABLE = "weight.nested_absmax", "weight.nested_quant_map"
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_FIELDS = FieldTable(
    read=frozenset({"llm_int8_skip_modules"}),
    only={
        "quant_method": ("bitsandbytes",),
        "load_in_4bit": (True,),
        "load_in_8bit": (False,),
        "bnb_4bit_quant_type": ("nf4", "fp4"),
        "bnb_4bit_quant_storage": ("uint8",),
    },
    inert=frozenset(
        {
            "_load_in_4bit",
            "_load_in_8bit",
            "bnb_4bit_compute_dtype",
            "bnb_4bit_use_double_quant",
            "llm_int8_enable_fp32_cpu_offload",
            "llm_int8_has_fp16_weight",
            "llm_int8_threshold",
        }
    ),
)
_MATRIX_AXES = 2


class BitsAndBytesFormat:
    """Four-bit weights of bitsandbytes; they have no whole codes and are always dequantized."""

    methods = ("bitsandbytes",)
    stored: ClassVar[dict[str, str]] = {
        "nf4, fp4, with or without double quantization": "4.13",
    }

    def read(self, section: Config, *, strict: bool) -> QuantizationScheme:
        """What ``quantization_config`` says."""
        if section.get("load_in_4bit") is not True:
            raise section.wrong("load_in_4bit", "true: 8-bit weights are not implemented")
        return QuantizationScheme(
            f"bitsandbytes {section.text('bnb_4bit_quant_type') or 'fp4'}",
            frozenset({SCALES, TABLE, NESTED_SCALES, NESTED_TABLE, *_STATES}),
            _read,
            by_prefix_or_end(listed(section, "llm_int8_skip_modules")),
            warnings=check_fields(section, _FIELDS, strict=strict),
        )


@dataclass(frozen=True)
class _State:
    """What the file says of one weight: its shape and how its scales are stored."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    nested_offset: float


def _read(module: str, parts: Parts) -> SourceTensor:
    weight, scales, table = required(module, parts, WEIGHT, SCALES, TABLE)
    stored = next((parts[name] for name in _STATES if name in parts), None)
    if stored is None:
        required(module, parts, _STATES[0])
    assert stored is not None
    state = _state(stored)
    count = math.prod(state.shape)
    if weight.dtype != "U8" or 2 * math.prod(weight.shape) != count + count % 2:
        raise misfit(weight, f"two codes a byte for the shape {list(state.shape)}")
    if scales.shape != (-(-count // state.block),):
        raise misfit(scales, f"a scale for each {state.block} of {count} numbers")
    if scales.dtype == "U8":
        required(module, parts, NESTED_SCALES, NESTED_TABLE)

    # Blocks run on from row to row, so the columns that share a scale are parts of a block.
    columns = math.gcd(state.shape[1], state.block)
    form = QuantizedForm(
        stored.name.rpartition("__")[2], "float", 4, (1, columns), part_bytes(parts)
    )

    def load() -> QuantizedTensor:
        codes = weight.load().flatten()
        # The high nibble comes first.
        nibbles = torch.stack((codes >> 4, codes & 0xF), dim=-1).flatten()[:count].int()
        factors = _scales(parts, state).repeat_interleave(state.block // columns)
        return QuantizedTensor(
            form,
            table.load().float()[nibbles].view(state.shape),
            factors[: count // columns].view(state.shape[0], -1),
        )

    return quantized_weight(module, parts, form, state.shape, load)


def _scales(parts: Parts, state: _State) -> Tensor:
    """float32 [blocks]; double quantization stores them as codes of blocks of their own."""
    scales = parts[SCALES].load()
    if scales.dtype != torch.uint8:
        return scales.float()
    outer = parts[NESTED_SCALES].load().float().repeat_interleave(state.nested_block)
    table = parts[NESTED_TABLE].load().float()
    return table[scales.int()] * outer[: len(scales)] + state.nested_offset


def _state(stored: SourceTensor) -> _State:
    """Reads the JSON that is stored as a tensor of bytes."""
    where = f"{stored.file}: {stored.name}"
    try:
        fields: dict[str, Any] = json.loads(bytes(stored.load().tolist()))
        check_numbers(where, fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecbuildError(f"{where} is no JSON ({error}); download it again") from None
    config = Config(where, stored.name, fields)
    shape = config.integers("shape") or ()
    if len(shape) != _MATRIX_AXES or min(shape) < 1:
        raise config.wrong("shape", "the rows and columns of a matrix")
    offset = config.get("nested_offset")
    if offset is not None and not isinstance(offset, int | float):
        raise config.wrong("nested_offset", "a number")
    return _State(
        (shape[0], shape[1]),
        config.integer("blocksize"),
        config.integer("nested_blocksize", 1),
        float(offset or 0),
    )
