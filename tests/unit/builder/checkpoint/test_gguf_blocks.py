"""Blocks of GGUF against gguf-py, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from gguf_files import stored, write_gguf

from specbuild.builder.checkpoint.gguf.block_types import READ
from specbuild.builder.checkpoint.gguf.blocks import is_quantised
from specbuild.builder.checkpoint.gguf.container import GgufTensor, read_gguf
from specbuild.builder.checkpoint.gguf.values import (
    part,
    quantized_form,
    read_quantized,
    read_values,
)

QUANTISED = [kind for kind in READ.values() if is_quantised(kind.name)]
IDS = [kind.name for kind in QUANTISED]


def written(path: Path, raw: np.ndarray, kind: str) -> GgufTensor:
    dtype = gguf.GGMLQuantizationType[kind]
    write_gguf(path, "llama", {}, {"t": (raw, dtype)})
    return read_gguf(path).tensors["t"]


@pytest.mark.parametrize("kind", QUANTISED, ids=IDS)
def test_random_blocks_are_dequantized_as_by_gguf_py(
    tmp_path: Path, kind: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random bytes are valid blocks, with scales that are NaN, infinite and subnormal."""
    name, nbytes = kind.name, kind.nbytes  # type: ignore[attr-defined]
    raw = np.random.default_rng(1).integers(0, 256, (3, 40, 8 * nbytes), dtype=np.uint8)
    tensor = written(tmp_path / "t.gguf", raw, name)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, gguf.GGMLQuantizationType[name])
    # The chunk size is not a multiple of a row.
    monkeypatch.setattr("specbuild.builder.checkpoint.gguf.values._PIECE_ELEMENTS", 7 * 256)
    result = read_values(tensor).numpy()
    assert result.shape == expected.shape
    either = np.isnan(result) & np.isnan(expected)
    assert ((result.view(np.uint32) == expected.view(np.uint32)) | either).all()
    rounded = torch.from_numpy(expected).bfloat16().view(torch.int16)
    there = read_values(tensor, torch.bfloat16).view(torch.int16)
    assert ((rounded == there) | torch.from_numpy(either)).all()
    matrix = part(tensor, 1)
    one = read_values(matrix).numpy()
    assert one.shape == expected[1].shape
    assert np.array_equal(one, expected[1], equal_nan=True)
    parts = read_quantized(matrix)
    assert parts.form == quantized_form(matrix)
    assert np.array_equal(parts.dequantize().numpy(), expected[1], equal_nan=True)
    order = torch.tensor([3, 39, 3, 0])
    chosen = parts.select_rows(order).dequantize(torch.bfloat16)
    there = torch.from_numpy(expected[1])[order].bfloat16()
    assert torch.equal(chosen.nan_to_num(), there.nan_to_num())


@pytest.mark.parametrize("kind", QUANTISED, ids=IDS)
def test_quantized_values_fit_the_stated_bits(tmp_path: Path, kind: object) -> None:
    name, nbytes = kind.name, kind.nbytes  # type: ignore[attr-defined]
    raw = np.random.default_rng(2).integers(0, 256, (40, 8 * nbytes), dtype=np.uint8)
    parts = read_quantized(written(tmp_path / "t.gguf", raw, name))
    distinct = parts.codes.unique().numel()
    # e2m1 has zeros of both signs, which count as one value.
    expected = 15 if parts.form.code_type == "e2m1" else 2**parts.form.bits
    assert distinct == expected
    assert parts.form.nbytes == raw.nbytes
    assert (parts.minima is not None) == parts.form.has_minima
    assert parts.scales.shape == (40, parts.shape[1] // parts.form.block[1])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_unquantized_values_are_unchanged(tmp_path: Path, kind: str) -> None:
    values = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    (raw, _), expected = stored(values, kind)
    result = read_values(written(tmp_path / "t.gguf", raw, kind))
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_the_packers_of_these_tests_are_accurate(kind: str) -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(4))
    _, back = stored(values, kind)
    error = (back - values).square().mean().sqrt().item()
    assert error < {"Q4_K": 0.09, "Q5_K": 0.045, "Q6_K": 0.025}[kind]


def test_rejects_a_file_that_shrinks_during_reading(tmp_path: Path) -> None:
    raw = np.zeros((4, 34), np.uint8)
    tensor = written(tmp_path / "t.gguf", raw, "Q8_0")
    data = (tmp_path / "t.gguf").read_bytes()
    (tmp_path / "t.gguf").write_bytes(data[: tensor.offset + 10])
    with pytest.raises(Exception, match=r"t\.gguf: became shorter while t was read"):
        read_values(tensor)
