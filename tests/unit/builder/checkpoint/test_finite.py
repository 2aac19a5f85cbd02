"""Weights that are not finite are rejected with their name, for every type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbuild.builder.checkpoint.finite import finite_tensors
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.runtime.errors import SpecbuildError


def loaded(tensor: torch.Tensor, name: str = "model.w") -> torch.Tensor:
    source = SourceTensor(
        name, "any", tuple(tensor.shape), ("on.disk",), lambda: tensor, Path("a.safetensors"), 0
    )
    return finite_tensors({"key": source})["key"].load()


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CODES = {
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e5m2: (*range(0x7C, 0x80), *range(0xFC, 0x100)),
    torch.float8_e8m0fnu: (0xFF,),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_rejects_floats_that_are_not_finite(dtype: torch.dtype, value: str) -> None:
    for count in (1, 7, 5000):
        tensor = torch.linspace(-3, min(torch.finfo(dtype).max, 1e38), count).to(dtype)
        assert loaded(tensor) is tensor
        for place in {0, count // 2, count - 1}:
            broken = tensor.clone()
            broken[place] = float(value)
            with pytest.raises(SpecbuildError, match=r"a\.safetensors: tensor on\.disk holds NaN"):
                loaded(broken.reshape(1, -1))


@pytest.mark.parametrize("dtype", list(CODES))
def test_rejects_fp8_values_that_are_not_finite(dtype: torch.dtype) -> None:
    """Check every value except those that the format defines as NaN or infinity."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    finite = codes[[code not in CODES[dtype] for code in range(256)]]
    assert finite.view(dtype).float().isfinite().all()
    loaded(finite.view(dtype))
    for code in CODES[dtype]:
        broken = torch.cat([finite, torch.tensor([code], dtype=torch.uint8)]).view(dtype)
        with pytest.raises(SpecbuildError, match=r"tensor on\.disk holds NaN or infinity"):
            loaded(broken)


def test_rejects_mxfp4_scales_of_nan() -> None:
    scales = torch.arange(255, dtype=torch.uint8)
    loaded(scales, "experts.down_proj_scales")
    broken = torch.cat([scales, torch.tensor([255], dtype=torch.uint8)])
    loaded(broken, "experts.down_proj_blocks")
    with pytest.raises(SpecbuildError, match="holds a scale of 255, which is NaN in MXFP4"):
        loaded(broken, "experts.down_proj_scales")


def test_accepts_integers_and_empty_tensors() -> None:
    for tensor in (torch.tensor([-1, 2**31 - 1]), torch.tensor([True]), torch.empty(0)):
        assert loaded(tensor) is tensor
    assert loaded(torch.empty(0, dtype=torch.uint8), "a_scales").numel() == 0
