"""``quant_method: modelopt``: NVIDIA's FP8, NVFP4 and MXFP8 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from specbuild.builder.checkpoint.config_fields import QUANTIZATION, FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.module_patterns import by_wildcard, listed
from specbuild.builder.checkpoint.quantization.packing import float_scales
from specbuild.builder.checkpoint.quantization.scaled import (
    NVFP4_GROUP,
    e2m1_weight,
    matrix_shape,
    scaled_weight,
)
from specbuild.builder.checkpoint.quantization.scheme import (
    WEIGHT,
    Parts,
    QuantizationScheme,
    misfit,
    required,
)
from specbuild.builder.checkpoint.source import SourceTensor, has_file, read_json
from specbuild.runtime.errors import SpecbuildError

CONFIG_FILE = "hf_quant_config.json"
SCALE, SECOND_SCALE = "weight_scale", "weight_scale_2"
_BLOCK = (128, 128)
# The rounding of activations by scheme.
_SCHEMES = {
    "FP8": "float8, static",
    "FP8_PER_CHANNEL_PER_TOKEN": "float8 a token",
    "FP8_PB_WO": "",
    "MXFP8": "float8 in groups of 32",
    "NVFP4": "float4 in groups of 16",
    "NVFP4_AWQ": "float4 in groups of 16",
    "W4A16_NVFP4": "",
    "MIXED_PRECISION": "as each layer's scheme says",
}
_FIELDS = FieldTable(
    read=frozenset({"exclude_modules", "ignore", "quant_algo"}),
    only={"quant_method": ("modelopt", "modelopt_fp4", "modelopt_mixed")},
    # Shapes and types of the tensors define the first three.
    inert=frozenset(
        {
            "config_groups",
            "group_size",
            "quantized_layers",
            "has_zero_point",
            "kv_cache_quant_algo",
            "kv_cache_scheme",
            "pre_quant_scale",
            "producer",
            "quant_library",
        }
    ),
)


class ModelOptFormat:
    """Weights of NVIDIA's ModelOpt."""

    methods = ("modelopt", "modelopt_fp4", "modelopt_mixed")
    stored: ClassVar[dict[str, str]] = {
        "FP8 by tensor, row or block": "8",
        "NVFP4": "4.5",
    }

    def read(self, section: Config, *, strict: bool) -> QuantizationScheme:
        """Read ``quantization_config`` or ``hf_quant_config.json``."""
        scheme = section.text("quant_algo") or ""
        if scheme not in _SCHEMES:
            raise SpecbuildError(
                f"{section.where}: quant_algo {scheme!r} of ModelOpt is not implemented "
                f"(supported: {', '.join(_SCHEMES)}); give the checkpoint that the weights were "
                "quantized from"
            )
        return QuantizationScheme(
            f"modelopt {scheme}",
            frozenset({SCALE, SECOND_SCALE, "pre_quant_scale"}),
            _read,
            by_wildcard(listed(section, "exclude_modules", "ignore")),
            _SCHEMES[scheme],
            check_fields(section, _FIELDS, strict=strict),
        )


def with_modelopt(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` with the section that ModelOpt's older releases write to another file.

    Raises SpecbuildError if that file is damaged.
    """
    file = path / CONFIG_FILE
    if not has_file(file) or config.get(QUANTIZATION) is not None:
        return config
    section = read_json(file).get("quantization")
    if not isinstance(section, dict):
        raise SpecbuildError(f"{file}: has no object quantization; download it again")
    return config | {QUANTIZATION: {"quant_method": "modelopt", **section}}


def _read(module: str, parts: Parts) -> SourceTensor:
    if "pre_quant_scale" in parts:
        smooth = parts["pre_quant_scale"]
        raise SpecbuildError(
            f"{smooth.file}: {smooth.name} scales inputs (ModelOpt's AWQ), which is not "
            "implemented; give a checkpoint in which it is folded into the norms"
        )
    weight, scale = required(module, parts, WEIGHT, SCALE)
    if weight.dtype == "F8_E4M3":
        rows, columns = matrix_shape(weight)
        grid = (-(-rows // _BLOCK[0]), -(-columns // _BLOCK[1]))
        # Blocks have an axis of size 1 after each of their axes.
        by_blocks = scale.shape in (grid, (grid[0], 1, grid[1], 1)) and grid != (1, 1)
        block = _BLOCK if by_blocks and scale.shape != (rows, 1) else None
        return scaled_weight(module, parts, scale, block=block)
    if weight.dtype != "U8":
        raise misfit(weight, "float8 (F8_E4M3) or packed four-bit floats (U8)")
    (second,) = required(module, parts, SECOND_SCALE)
    if scale.dtype != "F8_E4M3" or second.dtype != "F32" or second.shape not in ((), (1,)):
        raise misfit(scale, "float8 scales of groups, and one more float for the tensor")

    def scales() -> tuple[Tensor, Tensor]:
        factor = second.load().float().reshape(1, 1)
        return float_scales(scale.load()) * factor, factor.double()

    return e2m1_weight(
        module,
        parts,
        weight,
        scale,
        group=NVFP4_GROUP,
        scales=scales,
    )
