"""Small checkpoints in each format of quantized weights, with twins in plain fp32.

The quantized values are random. They are packed and dequantized by the formats' own libraries or
after the sources of these libraries, never by specbuild.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import Tensors, edit_config, write_json
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import (
    pack_fp4_to_uint8,
    unpack_fp4_from_uint8,
)
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The values of nf4 in the QLoRA paper (appendix E).
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
Shape = tuple[int, int]
Maker = Callable[[Shape, torch.Generator], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """``make`` returns the parts of a weight of this shape, and its values, fp32.

    ``section`` is its ``quantization_config``. With ``own_file`` it is written to ModelOpt's file.
    """

    section: dict[str, Any]
    make: Maker
    own_file: bool = False


def write_quantized(folder: Path, form: Format) -> None:
    """Quantize the plain checkpoint ``folder / "model"``; write its twin ``folder / "plain"``."""
    model, plain = folder / "model", folder / "plain"
    plain.mkdir()
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    stored: Tensors = {}
    for name, tensor in sorted(tensors.items()):
        module = name.removesuffix(".weight")
        is_router = module.endswith("mlp.gate")
        if tensor.dim() != 2 or ".layers." not in name or is_router:
            stored[name] = tensor
            continue
        parts, numbers = form.make((tensor.shape[0], tensor.shape[1]), generator)
        assert numbers.shape == tensor.shape
        tensors[name] = numbers.float()
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    metadata = {"format": "pt"}
    save_file(
        {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()},
        plain / "model.safetensors",
        metadata,
    )
    (plain / "config.json").write_text((model / "config.json").read_text())
    save_file(
        {n: t.clone(memory_format=torch.contiguous_format) for n, t in stored.items()},
        model / "model.safetensors",
        metadata,
    )
    if form.own_file:
        write_json(model / "hf_quant_config.json", {"quantization": form.section})
    else:
        edit_config(model, quantization_config=form.section)


def _copies(tensors: Tensors) -> Tensors:
    """Return contiguous copies that share no memory, as safetensors requires."""
    return {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}


def _fp8(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return (80 * torch.randn(shape, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)


def _sizes(shape: tuple[int, ...], size: float, generator: torch.Generator) -> torch.Tensor:
    """Return scales around ``size``, fp32."""
    return size * (0.5 + torch.rand(shape, generator=generator))


def fp8_scaled(
    grid: Callable[[Shape], tuple[int, ...]],
    scale_name: str,
    *,
    scale_type: torch.dtype = torch.float32,
    more: dict[str, torch.Tensor] | None = None,
) -> Maker:
    """Return FP8 weights with scales. transformers dequantizes them."""

    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = _fp8(shape, generator)
        scale = _sizes(grid(shape), shape[1] ** -0.5 / 60, generator)
        if scale_type == torch.float8_e8m0fnu:
            scale = 2.0 ** scale.log2().round()
        scale = scale.to(scale_type)
        matrix = scale if scale.dim() == 2 else scale.reshape(-1, 1)
        numbers = Fp8Dequantize(None)._dequantize_one(codes, matrix, torch.float32)
        return {"weight": codes, scale_name: scale, **(more or {})}, numbers

    return make


def compressed(
    kind: str,
    arguments: dict[str, Any],
    parts: Callable[[Shape, torch.Generator], Tensors],
    more: dict[str, torch.Tensor] | None = None,
) -> Maker:
    """Return weights of compressed-tensors. The library dequantizes them."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))

    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        stored = parts(shape, generator)
        if "weight_global_scale" in stored:  # whose decompressor rounds to bf16
            numbers = dequantize(
                unpack_fp4_from_uint8(stored["weight_packed"], *shape, torch.float32),
                stored["weight_scale"].float(),
                args=scheme.weights,
                global_scale=stored["weight_global_scale"],
                dtype=torch.float32,
            )
        else:
            library = BaseCompressor.get_value_from_registry(kind)
            numbers = library.decompress(dict(stored), scheme)["weight"]
        return {**stored, **(more or {})}, numbers

    return make


def section(kind: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the section as llm-compressor writes it."""
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "observer": "minmax", **arguments},
        "input_activations": None,
        "output_activations": None,
        **more,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "config_groups": {"group_0": group},
        "version": "0.12.2",
    }


def floats(grid: Callable[[Shape], tuple[int, ...]]) -> Any:
    def parts(shape: Shape, generator: torch.Generator) -> Tensors:
        scale = _sizes(grid(shape), shape[1] ** -0.5 / 60, generator)
        return {"weight": _fp8(shape, generator), "weight_scale": scale}

    return parts


def mxfp8(shape: Shape, generator: torch.Generator) -> Tensors:
    exponents = torch.randint(115, 119, (shape[0], shape[1] // 32), generator=generator)
    return {"weight": _fp8(shape, generator), "weight_scale": exponents.to(torch.uint8)}


def int8(shape: Shape, generator: torch.Generator) -> Tensors:
    codes = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    scale = _sizes((shape[0], 1), shape[1] ** -0.5 / 60, generator)
    return {"weight": codes, "weight_scale": scale}


def packed(bits: int, group: int | None, *, symmetric: bool) -> Any:
    def parts(shape: Shape, generator: torch.Generator) -> Tensors:
        top = 1 << bits - 1
        columns = 1 if group is None else shape[1] // group
        codes = torch.randint(-top, top, shape, generator=generator).to(torch.int8)
        made = {
            "weight_packed": pack_to_int32(codes, bits),
            "weight_scale": _sizes((shape[0], columns), shape[1] ** -0.5 * 2 / top, generator),
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            zeros = torch.randint(-top, top, (shape[0], columns), generator=generator)
            made["weight_zero_point"] = pack_to_int32(zeros.to(torch.int8), bits, packed_dim=0)
        return made

    return parts


def _four_bit_floats(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    codes = torch.randint(0, 16, shape, generator=generator)
    return torch.where(codes > 7, -1.0, 1.0) * E2M1[codes % 8]


def nvfp4(shape: Shape, generator: torch.Generator) -> Tensors:
    scale = _sizes((shape[0], shape[1] // 16), 100, generator).to(torch.float8_e4m3fn)
    return {
        "weight_packed": pack_fp4_to_uint8(_four_bit_floats(shape, generator)),
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([100 * shape[1] ** 0.5 * 2.7]),
    }


def mxfp4(shape: Shape, generator: torch.Generator) -> Tensors:
    return {
        "weight_packed": pack_fp4_to_uint8(_four_bit_floats(shape, generator)),
        "weight_scale": torch.randint(121, 124, (shape[0], shape[1] // 32), generator=generator).to(
            torch.uint8
        ),
    }


def ordered(shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Return weights with ``actorder: group`` of releases before 0.20.

    A column has the scale of its group.
    """
    parts = packed(4, 32, symmetric=True)(shape, generator)
    order = torch.randperm(shape[1], generator=generator) // 32
    codes = torch.stack([parts["weight_packed"] >> 4 * i & 15 for i in range(8)], -1).flatten(1)
    numbers = (codes - 8) * parts["weight_scale"][:, order]
    return {**parts, "weight_g_idx": order.to(torch.int32)}, numbers


def awq(shape: Shape, generator: torch.Generator, group: int = 32) -> tuple[Tensors, torch.Tensor]:
    """Pack and dequantize as AutoAWQ 0.2.9 does (utils/packing_utils.py)."""
    rows, columns = shape
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def pack(values: torch.Tensor) -> torch.Tensor:
        eights = values.long().unflatten(1, (-1, 8))[:, :, order]
        words = sum(eights[:, :, i] << 4 * i for i in range(8))
        assert isinstance(words, torch.Tensor)
        return words.to(torch.int32)

    codes = torch.randint(0, 16, (columns, rows), generator=generator)
    zeros = torch.randint(4, 12, (columns // group, rows), generator=generator)
    scales = _sizes((columns // group, rows), columns**-0.5 / 4, generator).half()
    parts = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
    reverse = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def unpack(words: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4)
        columns = torch.bitwise_right_shift(words[:, :, None], shifts).to(torch.int8).flatten(1)
        places = torch.arange(columns.shape[1]).view(-1, 8)[:, reverse].flatten()
        return torch.bitwise_and(columns[:, places], 15)

    spread = [t.repeat_interleave(group, dim=0) for t in (unpack(parts["qzeros"]), scales.float())]
    return parts, ((unpack(parts["qweight"]) - spread[0]) * spread[1]).T


def gptq(bits: int, *, version: int, ordered: bool, biases: bool = False) -> Maker:
    """Pack bit by bit, and dequantize as AutoGPTQ's torch fallback does."""
    group = 32

    def pack(values: torch.Tensor) -> torch.Tensor:
        """Pack along the first axis, dense, the lowest bits first."""
        planes = values[:, None, :] >> torch.arange(bits)[None, :, None] & 1
        planes = planes.flatten(0, 1).unflatten(0, (-1, 32))
        words = (planes << torch.arange(32)[None, :, None]).sum(1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = shape
        codes = torch.randint(0, 1 << bits, (columns, rows), generator=generator)
        zeros = torch.randint(0, 1 << bits, (columns // group, rows), generator=generator)
        size = columns**-0.5 * 4 / (1 << bits)
        scales = _sizes((columns // group, rows), size, generator).half()
        order = torch.arange(columns) // group
        if ordered:
            order = order[torch.randperm(columns, generator=generator)]
        stored = zeros if version == 2 else zeros - 1 & (1 << bits) - 1
        parts = {
            "qweight": pack(codes),
            "qzeros": pack(stored.T).T,
            "scales": scales,
            "g_idx": order.to(torch.int32),
        }
        if biases:
            parts["bias"] = torch.zeros(rows)
        return parts, (scales.float()[order] * (codes - zeros[order])).T

    return make


def modelopt_fp4(shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Dequantize as ModelOpt 0.47 does (qtensor/nvfp4_tensor.py)."""
    values = _four_bit_floats(shape, generator)
    scale = _sizes((shape[0], shape[1] // 16), 100, generator).to(torch.float8_e4m3fn)
    second = torch.tensor(shape[1] ** -0.5 / 270)
    by_group = scale.float() * second
    numbers = (values.view(shape[0], -1, 16) * by_group[:, :, None]).view(shape)
    parts = {
        "weight": pack_fp4_to_uint8(values),
        "weight_scale": scale,
        "weight_scale_2": second,
        "input_scale": torch.tensor(0.1),
    }
    return parts, numbers


def nf4(*, nested: bool) -> Maker:
    """Dequantize by the formula of the QLoRA paper."""

    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        count = shape[0] * shape[1]
        codes = torch.randint(0, 16, (count,), generator=generator)
        state: dict[str, Any] = {
            "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape),
        }  # fmt: skip
        parts: Tensors = {
            "weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            "weight.quant_map": NF4,
        }
        size = 2 * shape[1] ** -0.5
        if nested:
            table = torch.linspace(-1, 1, 256)
            places = torch.randint(0, 256, (count // 64,), generator=generator)
            outer = _sizes((-(-len(places) // 256),), size / 3, generator)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": size}
            parts |= {
                "weight.absmax": places.to(torch.uint8),
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": table,
            }
            scales = table[places] * outer[torch.arange(len(places)) // 256] + size
        else:
            scales = parts["weight.absmax"] = _sizes((count // 64,), size, generator)
        data = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(data), dtype=torch.uint8)
        return parts, (NF4[codes].view(-1, 64) * scales[:, None]).view(shape)

    return make
