"""FP8 weights with a scale for each block: their values, and rejected checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_config, edit_tensors
from deepseek_checkpoints import quantise, write_deepseek
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.registry import float_tensors
from specbuild.builder.checkpoint.source import read_header
from specbuild.builder.families.checkpoints import read_target
from specbuild.runtime.errors import SpecbuildError

NAME = "model.layers.1.self_attn.o_proj.weight"
SCALE = f"{NAME}_scale_inv"
DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3"}
TRANSFORMERS = {"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}


def section(block: tuple[int, int]) -> Config:
    fields = {"quant_method": "fp8", "weight_block_size": list(block)}
    return Config("config.json", "config.json", {"quantization_config": fields})


def by_element(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in codes.shape), indexing="ij")
    return codes.to(torch.float32) * scale[rows // block[0], columns // block[1]]


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9),
    block=st.tuples(st.integers(1, 5), st.integers(1, 5)), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_a_value_is_multiplied_by_the_scale_of_its_block(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    columns: int,
    block: tuple[int, int],
    seed: int,
) -> None:
    """Compare bit for bit with torch's fp8 conversion, for every value and partial blocks."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator).to(torch.uint8)
    codes[codes % 128 == 127] = 0  # NaN
    weight = codes.view(torch.float8_e4m3fn)
    scale = torch.randn(-(-rows // block[0]), -(-columns // block[1]), generator=generator)
    file = tmp_path_factory.mktemp("fp8") / "model.safetensors"
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, file)
    loaded = float_tensors(read_header(file), section(block), strict=True).tensors
    assert set(loaded) == {"a.weight"}
    tensor = loaded["a.weight"]
    assert (tensor.dtype, tensor.shape, tensor.file) == ("F32", (rows, columns), None)
    assert tensor.sources == ("a.weight_scale_inv", "a.weight")
    assert torch.equal(tensor.load(), by_element(weight, scale, block))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8") / "model"
    write_deepseek(path, dtype="bfloat16")
    quantise(path, (16, 16), **DEEPSEEK)
    return path


@pytest.mark.parametrize("spelling", [DEEPSEEK, TRANSFORMERS])
def test_both_formats_of_the_config_section(written: Path, spelling: dict[str, Any]) -> None:
    fields = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    edit_config(written, quantization_config=fields | spelling)
    checkpoint = read_target(written, strict=True)
    (warning,) = checkpoint.warnings
    assert "fp8 rounds activations (float8, dynamic); engines keep the weights" in warning
    assert checkpoint.quantization is not None
    assert checkpoint.source_types["model.layers.N.self_attn.o_proj.weight"] == {"fp8 16x16": 2}
    stored = load_file(written / "model.safetensors")
    loaded = checkpoint.tensors[NAME].load()
    assert torch.equal(loaded, by_element(stored[NAME], stored[SCALE], (16, 16)))
    assert checkpoint.tensors["lm_head.weight"].dtype == "BF16"
    assert checkpoint.tensors["model.layers.1.mlp.experts.down_proj"].dtype == "F32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "hqq"}, "quantized by 'hqq', which is not implemented"),
        ({"weight_block_size": None}, "expected a scale for the tensor, for each row, or"),
        ({"weight_block_size": [0, 16]}, "expected the rows and columns of a block, [128, 128]"),
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not implemented"),
        ({"bits": 4}, "unknown fields bits"),
    ],
)
def test_rejects_other_quantizations(written: Path, changes: dict[str, Any], message: str) -> None:
    fields = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    edit_config(written, quantization_config=fields | changes)
    with pytest.raises(SpecbuildError) as error:
        read_target(written, strict=True)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(SCALE), f"{NAME} is F8_E4M3, but its scales {SCALE} are not there"),
        (lambda t: t.pop(NAME), f"{SCALE} belongs to a quantized weight, but {NAME} is not there"),
        (lambda t: t.update({NAME: t[NAME].float()}), f"{NAME} is F32 [64, 80], expected F8_E4M3"),
        (
            lambda t: t.update({SCALE: t[SCALE][:, :-1].contiguous()}),
            f"{SCALE} is F32 [4, 4], expected [4, 5] scales for blocks of [16, 16]",
        ),
        (
            lambda t: t.update({SCALE: t[SCALE].to(torch.int8)}),
            f"{SCALE} is I8 [4, 5], expected floats",
        ),
    ],
)
def test_rejects_weights_and_scales_that_do_not_match(
    written: Path, tmp_path: Path, edit: Any, message: str
) -> None:
    for file in written.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_config(
        tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}
    )
    edit_tensors(tmp_path, edit)
    with pytest.raises(SpecbuildError) as error:
        read_target(tmp_path, strict=False)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(SpecbuildError, match=r"quantized weights that no quantization_config in"):
        read_target(tmp_path, strict=False)
