"""The formats of quantized weights that are tested, with the section that their tools write."""

from __future__ import annotations

import torch
from quantized_checkpoints import (
    Format,
    Shape,
    awq,
    compressed,
    floats,
    fp8_scaled,
    gptq,
    int8,
    modelopt_fp4,
    mxfp4,
    mxfp8,
    nf4,
    nvfp4,
    ordered,
    packed,
    section,
)


def _per_block(shape: Shape) -> Shape:
    return shape[0] // 16, shape[1] // 32


def _per_row(shape: Shape) -> Shape:
    return shape[0], 1


_FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}
_DYNAMIC = {"input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                                  "dynamic": True, "symmetric": True}}  # fmt: skip
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_CHANNEL = _FLOAT8 | {"strategy": "channel"}
_BLOCK8 = _FLOAT8 | {"strategy": "block", "block_structure": [16, 32]}
_MX8 = _FLOAT8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_W4_ZEROS = _W4 | {"symmetric": False}
_W3 = {"num_bits": 3, "type": "int", "strategy": "channel", "symmetric": True}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "symmetric": True}  # fmt: skip
_MX4 = _FP4 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_GPTQ = {"quant_method": "gptq", "group_size": 32, "sym": False, "true_sequential": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None}  # fmt: skip
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True}  # fmt: skip
_INPUT = {"input_scale": torch.tensor(0.5)}

FORMATS: dict[str, Format] = {
    "fp8 blocks": Format(_FP8_BLOCKS, fp8_scaled(_per_block, "weight_scale_inv")),
    "fp8 blocks, bf16 scales": Format(
        _FP8_BLOCKS, fp8_scaled(_per_block, "weight_scale_inv", scale_type=torch.bfloat16)
    ),
    "fp8 blocks, e8m0 scales": Format(
        _FP8_BLOCKS | {"scale_fmt": "ue8m0"},
        fp8_scaled(_per_block, "weight_scale_inv", scale_type=torch.float8_e8m0fnu),
    ),
    "fp8 a tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8_scaled(lambda _: (1,), "weight_scale", more=_INPUT),
    ),
    "fbgemm fp8": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
         "modules_to_not_convert": ["lm_head"]},
        fp8_scaled(_per_row, "weight_scale"),
    ),
    "compressed-tensors fp8 dynamic": Format(
        section("float-quantized", _CHANNEL, **_DYNAMIC),
        compressed("float-quantized", _CHANNEL, floats(_per_row)),
    ),
    "compressed-tensors fp8 blocks": Format(
        section("float-quantized", _BLOCK8, **_DYNAMIC),
        compressed("float-quantized", _BLOCK8, floats(_per_block)),
    ),
    "compressed-tensors mxfp8": Format(
        section("mxfp8-quantized", _MX8), compressed("mxfp8-quantized", _MX8, mxfp8)
    ),
    "compressed-tensors w8a8": Format(
        section("int-quantized", _INT8,
                 input_activations={"num_bits": 8, "type": "int", "strategy": "token",
                                    "dynamic": True}),
        compressed("int-quantized", _INT8, int8),
    ),
    "compressed-tensors w4a16": Format(
        section("pack-quantized", _W4),
        compressed("pack-quantized", _W4, packed(4, 32, symmetric=True)),
    ),
    "compressed-tensors w4a16 with zero points": Format(
        section("pack-quantized", _W4_ZEROS),
        compressed("pack-quantized", _W4_ZEROS, packed(4, 32, symmetric=False)),
    ),
    "compressed-tensors w4a16, ordered": Format(
        section("pack-quantized", _W4 | {"actorder": "group"}), ordered
    ),
    "compressed-tensors w3a16": Format(
        section("pack-quantized", _W3),
        compressed("pack-quantized", _W3, packed(3, None, symmetric=True)),
    ),
    "compressed-tensors nvfp4": Format(
        section("nvfp4-pack-quantized", _FP4,
                 input_activations=_FP4 | {"dynamic": "local"}),
        compressed("nvfp4-pack-quantized", _FP4, nvfp4,
                    {"input_global_scale": torch.tensor([3.0])}),
    ),
    "compressed-tensors mxfp4": Format(
        section("mxfp4-pack-quantized", _MX4), compressed("mxfp4-pack-quantized", _MX4, mxfp4)
    ),
    "awq": Format(_AWQ, awq),
    "gptq": Format(_GPTQ | {"bits": 4, "desc_act": False},
                   gptq(4, version=1, ordered=False, biases=True)),
    "gptq, ordered": Format(_GPTQ | {"bits": 4, "desc_act": True},
                            gptq(4, version=1, ordered=True)),
    "gptq of 3 bits": Format(_GPTQ | {"bits": 3, "desc_act": False},
                             gptq(3, version=1, ordered=False)),
    "gptq of 8 bits": Format(_GPTQ | {"bits": 8, "desc_act": False},
                             gptq(8, version=1, ordered=False)),
    "gptq version 2 of 8 bits, ordered": Format(
        _GPTQ | {"bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(8, version=2, ordered=True),
    ),
    "modelopt fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
         "kv_cache_scheme": None, "producer": {"name": "modelopt"}},
        fp8_scaled(lambda _: (1,), "weight_scale", more=_INPUT),
    ),
    "modelopt nvfp4": Format(
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
         "exclude_modules": ["lm_head*"]},
        modelopt_fp4,
        own_file=True,
    ),
    "bitsandbytes nf4": Format(_NF4, nf4(nested=False)),
    "bitsandbytes nf4, twice": Format(_NF4, nf4(nested=True)),
}  # fmt: skip
