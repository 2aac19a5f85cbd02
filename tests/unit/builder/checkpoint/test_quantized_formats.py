"""Checkpoints of every quantized format against plain twins, whose numbers libraries computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llama_checkpoints import write_llama
from quantized_checkpoints import write_quantized
from quantized_formats import FORMATS

from specbuild.builder.families.checkpoints import read_target

_DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_libraries(tmp_path: Path, name: str) -> None:
    write_llama(tmp_path / "model")
    write_quantized(tmp_path, FORMATS[name])
    found = read_target(tmp_path / "model", strict=True)
    plain = read_target(tmp_path / "plain", strict=True)
    assert found.tensors.keys() == plain.tensors.keys()
    for key, twin in plain.tensors.items():
        tensor = found.tensors[key]
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
    quantization = found.quantization
    assert quantization is not None
    assert quantization.scheme.split(" ")[0] in name
    assert len(found.source_types[_DOWN.replace("1", "N")]) == 1
