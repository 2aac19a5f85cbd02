"""Checkpoints of every quantized format against unquantized copies of library-computed values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llama_checkpoints import OF_KIND, write_llama
from quantized_checkpoints import write_quantized
from quantized_formats import FORMATS

from specbuild.builder.families.checkpoints import read_target

_DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("name", FORMATS)
def test_values_equal_those_of_the_libraries(tmp_path: Path, name: str) -> None:
    write_llama(tmp_path / "model")
    write_quantized(tmp_path, FORMATS[name])
    result = read_target(tmp_path / "model", strict=True)
    plain = read_target(tmp_path / "plain", strict=True)
    assert result.tensors.keys() == plain.tensors.keys()
    for key, twin in plain.tensors.items():
        tensor = result.tensors[key]
        expected = twin.load()
        assert tensor.shape == twin.shape
        assert torch.equal(tensor.load(), expected), key
        if tensor.load_as is not None:
            assert torch.equal(tensor.load_as(torch.bfloat16), expected.bfloat16()), key
        if tensor.quantized is not None:
            parts = tensor.quantized.load()
            assert parts.form == tensor.quantized.form
            assert torch.equal(parts.dequantize(), expected), key
            assert (parts.groups is not None) == parts.form.has_order
            assert (parts.zero_points is not None) == parts.form.has_zero_points
    quantization = result.quantization
    assert quantization is not None
    assert quantization.scheme.split(" ")[0] in name
    assert len(result.source_types[_DOWN.replace("1", "N")]) == 1


@pytest.mark.parametrize("kind", [kind for kind in OF_KIND if kind != "qwen3_vl_text"])
def test_every_family_reads_quantized_formats(tmp_path: Path, kind: str) -> None:
    """Include other tensor names, stacked experts, and a projection that is split into three."""
    write_llama(tmp_path / "model", kind)
    write_quantized(tmp_path, FORMATS["compressed-tensors fp8 dynamic"])
    result = read_target(tmp_path / "model", strict=False)
    plain = read_target(tmp_path / "plain", strict=False)
    assert result.geometry == plain.geometry
    assert result.tensors.keys() == plain.tensors.keys()
    for key, twin in plain.tensors.items():
        assert torch.equal(result.tensors[key].load(), twin.load()), key
    assert {"fp8 channel"} <= {name for types in result.source_types.values() for name in types}


def test_rows_of_a_fused_projection_stay_quantized(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", "phi3")
    write_quantized(tmp_path, FORMATS["compressed-tensors w4a16 with zero points"])
    tensors = read_target(tmp_path / "model", strict=True).tensors
    stored = 0
    for part in "qkv":
        tensor = tensors[f"model.layers.1.self_attn.{part}_proj.weight"]
        assert tensor.quantized is not None
        parts = tensor.quantized.load()
        assert parts.form == tensor.quantized.form
        assert torch.equal(parts.dequantize(), tensor.load())
        stored += parts.form.nbytes
    # Four-bit values, fp32 scales and zero points for groups of 32, and the shape.
    rows, columns = 64 + 2 * 32, 64
    assert stored == rows * columns // 2 + rows * columns // 32 * 4 + rows * columns // 64 + 16
