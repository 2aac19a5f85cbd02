"""Weights of synthetic checkpoints in quantized formats: random codes, realistic scales.

The weights of layers are quantized; the embedding, the head, norms, routers and biases are not, as
in released checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.tensor import SynthTensor, whole_tensor
from specbuild.plugins_cuda.moe.e2m1 import E2M1
from specbuild.runtime.errors import SpecbuildError

SynthTensors = dict[str, SynthTensor]
# The deviation of scales from their mean.
_SCALE_STD = 0.2
_MATRIX_AXES = 2
_INT4_GROUP, _NVFP4_GROUP, _FP8_BLOCK = 128, 16, 128
# The deviation of float8 codes; four of it are below the largest number, 448.
_FP8_STD = 100.0
# The mean of NVFP4's scales of groups, in the middle of float8's range.
_NVFP4_SCALE = 16.0


@dataclass(frozen=True)
class WeightsFormat:
    """``parts`` returns the tensors of a module; a row has complete groups of ``group``.

    ``section`` is ``quantization_config``.
    """

    parts: Callable[[Noise, str, SynthTensor], SynthTensors]
    group: int
    section: Mapping[str, Any]


def quantized_weights(noise: Noise, tensors: SynthTensors, name: str) -> SynthTensors:
    """Return the tensors of a checkpoint with the weights of its layers in this format.

    Raises SpecbuildError if a row does not have complete groups.
    """
    form = WEIGHTS_FORMATS[name]
    made: SynthTensors = {}
    for key, tensor in tensors.items():
        if not is_quantized(key, tensor):
            made[key] = tensor
            continue
        columns = tensor.shape[1]
        if columns % form.group:
            raise SpecbuildError(
                f"--weights-format {name} stores groups of {form.group} inputs, but {key} has "
                f"{columns}; choose another --geometry or format"
            )
        module = key.removesuffix(".weight")
        parts = form.parts(noise, module, tensor)
        made |= {f"{module}.{part}": stored for part, stored in parts.items()}
    return made


def is_quantized(name: str, tensor: SynthTensor) -> bool:
    """Return whether releases quantize it: matrices of layers, without routers."""
    return tensor.std is not None and len(tensor.shape) == _MATRIX_AXES and ".layers." in name


def _rows(
    dtype: str, shape: tuple[int, int], make: Callable[[torch.Tensor], torch.Tensor]
) -> SynthTensor:
    return SynthTensor(dtype, shape, lambda first, end: make(torch.arange(first, end)))


def _int4(noise: Noise, module: str, weight: SynthTensor) -> SynthTensors:
    """Return compressed-tensors' W4A16: eight codes per word."""
    rows, columns = weight.shape
    mean = _std(weight) / _rms([code - 8 for code in range(16)])
    return {
        "weight_packed": _rows(
            "I32",
            (rows, columns // 8),
            lambda r: noise.bytes(module, r, columns // 2).view(torch.int32),
        ),
        "weight_scale": _scales(noise, module, (rows, columns // _INT4_GROUP), mean, "BF16"),
        "weight_shape": whole_tensor("I64", (2,), lambda: torch.tensor([rows, columns])),
    }


def _fp8(noise: Noise, module: str, weight: SynthTensor) -> SynthTensors:
    rows, columns = weight.shape

    def codes(r: torch.Tensor) -> torch.Tensor:
        normal = noise.normal(module, r, columns, _FP8_STD)
        return normal.clamp_(-448, 448).to(torch.float8_e4m3fn)

    blocks = (-(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK))
    return {
        "weight": _rows("F8_E4M3", (rows, columns), codes),
        "weight_scale_inv": _scales(noise, module, blocks, _std(weight) / _FP8_STD, "F32"),
    }


def _nvfp4(noise: Noise, module: str, weight: SynthTensor) -> SynthTensors:
    """Return compressed-tensors' NVFP4: the scale of the tensor divides."""
    rows, columns = weight.shape
    divisor = _NVFP4_SCALE * _rms(E2M1) / _std(weight)
    return {
        "weight_packed": _rows(
            "U8", (rows, columns // 2), lambda r: noise.bytes(module, r, columns // 2)
        ),
        "weight_scale": _scales(
            noise, module, (rows, columns // _NVFP4_GROUP), _NVFP4_SCALE, "F8_E4M3"
        ),
        "weight_global_scale": whole_tensor("F32", (1,), lambda: torch.tensor([divisor])),
    }


_SCALE_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


def _scales(
    noise: Noise, module: str, shape: tuple[int, int], mean: float, dtype: str
) -> SynthTensor:
    def make(rows: torch.Tensor) -> torch.Tensor:
        factors = 1 + noise.normal(f"{module}.scales", rows, shape[1], _SCALE_STD)
        return (mean * factors.abs_()).to(_SCALE_TYPES[dtype])

    return _rows(dtype, shape, make)


def _std(weight: SynthTensor) -> float:
    assert weight.std is not None
    return weight.std


def _rms(codes: Any) -> float:
    """Return the deviation of codes that are equally frequent."""
    return math.sqrt(sum(code**2 for code in codes) / len(codes))


def _compressed(kind: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {"group_0": group},
    }


_INT4_FIELDS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _INT4_GROUP}
_NVFP4_FIELDS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": _NVFP4_GROUP,
}
WEIGHTS_FORMATS = {
    "int4-g128": WeightsFormat(_int4, _INT4_GROUP, _compressed("pack-quantized", _INT4_FIELDS)),
    "fp8-block": WeightsFormat(
        _fp8,
        1,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "nvfp4": WeightsFormat(
        _nvfp4, _NVFP4_GROUP, _compressed("nvfp4-pack-quantized", _NVFP4_FIELDS)
    ),
}
