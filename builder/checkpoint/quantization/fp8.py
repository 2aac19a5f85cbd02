"""``quant_method: fp8``: float8 weights with scales for blocks, rows or tensors.

DeepSeek-V3 and Qwen3 store ``weight_scale_inv`` for blocks of 128 x 128 (a factor, in spite of its
name), AutoFP8 one ``weight_scale`` for a tensor, and FBGEMM one for each row.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.module_patterns import by_prefix_or_end, listed
from specbuild.builder.checkpoint.quantization.scaled import scaled_weight
from specbuild.builder.checkpoint.quantization.scheme import (
    WEIGHT,
    Parts,
    QuantizationScheme,
    misfit,
    required,
)
from specbuild.builder.checkpoint.quantization.tensor import Block
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.runtime.errors import SpecbuildError

STORED = "F8_E4M3"
_SCALES = ("weight_scale_inv", "weight_scale")
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers")
_FIELDS = FieldTable(
    read=frozenset({"weight_block_size", "activation_scheme", *_LEFT_OUT}),
    only={"quant_method": ("fp8", "fbgemm_fp8"), "fmt": ("e4m3", "float8_e4m3fn")},
    inert=frozenset(
        {
            "activation_scale_ub",
            "dequantize",
            "kv_cache_scheme",
            "modules_to_convert",
            "scale_fmt",
        }
    ),
)


class Fp8Format:
    """Float8 weights of DeepSeek, Qwen, AutoFP8 and FBGEMM."""

    methods = ("fp8", "fbgemm_fp8")
    stored: ClassVar[dict[str, str]] = {
        "float8, a scale for each block of 128 × 128": "8",
        "float8, a scale for each row or the tensor": "8",
    }

    def read(self, section: Config, *, strict: bool) -> QuantizationScheme:
        """Read ``quantization_config``."""
        warnings = check_fields(section, _FIELDS, strict=strict)
        block = _block(section)
        if section.text("quant_method") == "fbgemm_fp8":
            activations = "float8 a token"
        else:
            scheme = section.text("activation_scheme") or "dynamic"
            activations = f"float8, {scheme}"
        return QuantizationScheme(
            "fp8",
            frozenset(_SCALES),
            partial(_read, block=block),
            by_prefix_or_end(listed(section, *_LEFT_OUT)),
            activations,
            warnings,
        )


def _block(section: Config) -> Block | None:
    sizes = section.integers("weight_block_size")
    if sizes is None:
        return None
    if len(sizes) != 2 or min(sizes) < 1:
        raise section.wrong("weight_block_size", "the rows and columns of a block, [128, 128]")
    return sizes[0], sizes[1]


def _read(module: str, parts: Parts, *, block: Block | None) -> SourceTensor:
    scale = next((parts[name] for name in _SCALES if name in parts), None)
    if scale is None:
        weight = parts[WEIGHT]
        name = _SCALES[0] if block else _SCALES[1]
        raise SpecbuildError(
            f"{weight.file}: {weight.name} is {weight.dtype}, but its scales {module}.{name} are "
            "not there; download the checkpoint again"
        )
    (weight,) = required(module, parts, WEIGHT)
    if weight.dtype != STORED:
        raise misfit(weight, f"{STORED}, which {scale.name} scales")
    by_blocks = block if scale.name.endswith("_inv") else None
    return scaled_weight(module, parts, scale, block=by_blocks)
