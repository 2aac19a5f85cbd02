"""Rejected quantized checkpoints: inconsistent parts, and unsupported variants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Tensors, edit_config, edit_tensors
from llama_checkpoints import write_llama
from quantized_checkpoints import write_quantized
from quantized_formats import FORMATS
from safetensors.torch import save_file

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.registry import float_tensors
from specbuild.builder.checkpoint.source import read_header
from specbuild.builder.families.checkpoints import read_target
from specbuild.runtime.errors import SpecbuildError

MODULE = "model.layers.1.mlp.up_proj"
W4 = "compressed-tensors w4a16 with zero points"


def written(folder: Path, name: str) -> Path:
    write_llama(folder / "model")
    write_quantized(folder, FORMATS[name])
    return folder / "model"


def section(model: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((model / "config.json").read_text())["quantization_config"]
    return fields


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("awq", {"version": "gemv"}, "version 'gemv' is not implemented (supported: 'gemm'"),
        ("awq", {"bits": 3}, "bits 3 is not implemented"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not implemented"),
        ("gptq", {"bits": 5}, "bits: got 5, expected one of 2, 3, 4, 8"),
        ("gptq", {"dynamic": {"+:(": {}}}, "'+:(' is no regular expression"),
        (
            "bitsandbytes nf4",
            {"load_in_4bit": False, "load_in_8bit": True},
            "8-bit weights are not",
        ),
        ("modelopt fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' of ModelOpt is not"),
        (W4, {"format": "marlin-24"}, "format 'marlin-24' is not implemented"),
        (W4, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "expected no sparsity"),
        (W4, {"quantization_status": "frozen"}, "quantization_status 'frozen' is not implemented"),
        (W4, {"config_groups": {}}, "no entry of config_groups names model.layers.0"),
        (W4, {"quant_method": "hqq"}, "quantized by 'hqq', which is not implemented"),
        ("fp8 blocks", {"fmt": "e5m2"}, "fmt 'e5m2' is not implemented"),
    ],
)
def test_the_error_names_an_unsupported_variant(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    model = written(tmp_path, name)
    edit_config(model, quantization_config=section(model) | changes)
    with pytest.raises(SpecbuildError) as error:
        read_target(model, strict=False)
    assert message in str(error.value)


def change(part: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{MODULE}.{part}"] = make(tensors[f"{MODULE}.{part}"]).clone()

    return edit


def remove(part: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"{MODULE}.{part}")


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("awq", remove("qzeros"), f"{MODULE}.qzeros is not there"),
        ("awq", change("scales", lambda t: t[:, :-8]), "scales is F16 [2, 88], expected floats"),
        ("gptq", change("qzeros", lambda t: t[:-1]), "expected packed 4-bit zero points for 2"),
        ("gptq", change("g_idx", lambda t: t[:-1]), "expected the group of each of 64 inputs"),
        (W4, remove("weight_scale"), f"{MODULE}.weight_scale is not there"),
        (W4, change("weight_packed", lambda t: t[:, :-1]), "expected 4 bits for each of [96, 64]"),
        ("compressed-tensors nvfp4", change("weight_scale", lambda t: t[:, :-1]),
         "expected a scale for each 16 of 64 inputs of 96 rows"),
        ("compressed-tensors w8a8", change("weight", lambda t: t.float()), "are not compressed"),
        ("modelopt nvfp4", remove("weight_scale_2"), f"{MODULE}.weight_scale_2 is not there"),
        ("bitsandbytes nf4", remove("weight.absmax"), f"{MODULE}.weight.absmax is not there"),
        ("bitsandbytes nf4", change("weight", lambda t: t[:-1]), "two codes a byte for the shape"),
        ("fp8 a tensor", remove("weight_scale"), f"but its scales {MODULE}.weight_scale are not"),
    ],
)  # fmt: skip
def test_the_error_names_inconsistent_parts(
    tmp_path: Path, name: str, edit: Callable[[Tensors], None], message: str
) -> None:
    model = written(tmp_path, name)
    edit_tensors(model, edit)
    with pytest.raises(SpecbuildError) as error:
        read_target(model, strict=False)
    assert message in str(error.value) and MODULE in str(error.value)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gptq", change("g_idx", lambda t: t.flip(0)), "says desc_act false; set it to true"),
        ("gptq, ordered", change("g_idx", lambda t: t + 1), "expected groups from 0 to 1"),
        (W4, change("weight_shape", lambda t: t.flip(0)), "expected the weight's shape [96, 64]"),
    ],
)
def test_rejects_invalid_values_of_tensors(
    tmp_path: Path, name: str, edit: Callable[[Tensors], None], message: str
) -> None:
    model = written(tmp_path, name)
    edit_tensors(model, edit)
    weight = read_target(model, strict=False).tensors[f"{MODULE}.weight"]
    with pytest.raises(SpecbuildError) as error:
        weight.load()
    assert message in str(error.value) and MODULE in str(error.value)


def test_rejects_a_tensor_without_a_module(tmp_path: Path) -> None:
    model = written(tmp_path, "awq")
    edit_tensors(model, lambda t: t.update({f"{MODULE}.smooth": torch.ones(3)}))
    with pytest.raises(SpecbuildError, match=rf"left over: {MODULE}\.smooth, shape \[3\] F32"):
        read_target(model, strict=False)


@pytest.mark.parametrize("name", ["awq", W4, "fp8 blocks", "bitsandbytes nf4"])
def test_rejects_a_config_without_a_quantization_section(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, name)
    edit_config(model, quantization_config=None)
    with pytest.raises(SpecbuildError, match="weights that no quantization_config in config"):
        read_target(model, strict=False)


def test_block_scales_of_modelopt_have_axes_of_length_1(tmp_path: Path) -> None:
    """FP8_PB_WO stores [rows, 1, columns, 1] for blocks of 128."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 1, 3, 1, generator=generator)
    file = tmp_path / "model.safetensors"
    save_file({"a.weight": codes, "a.weight_scale": scale}, file)
    fields = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    config = Config("config.json", "config.json", {"quantization_config": fields})
    weight = float_tensors(read_header(file), config, strict=True).tensors["a.weight"]
    spread = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(weight.load(), codes.float() * spread)
    assert weight.quantized is not None and weight.quantized.form.block == (128, 128)


def test_rejects_biases_that_are_not_zero(tmp_path: Path) -> None:
    model = written(tmp_path, "gptq")
    edit_tensors(model, change("bias", lambda t: t + 1))
    with pytest.raises(SpecbuildError, match=rf"left over: {MODULE}\.bias"):
        read_target(model, strict=False)


@pytest.mark.parametrize(
    ("name", "field", "patterns"),
    [
        ("awq", "modules_to_not_convert", ["1.mlp.up"]),
        ("fp8 blocks", "modules_to_not_convert", ["model.layers.1.mlp.up_proj"]),
        (W4, "ignore", [r"re:model\.layers\.1\.mlp\.up.*"]),
        ("modelopt fp8", "ignore", ["model.layers.1.mlp.u*"]),
        ("gptq", "dynamic", {r"-:model\.layers\.1\.mlp\.up": {}}),
        ("bitsandbytes nf4", "llm_int8_skip_modules", ["layers.1.mlp.up_proj"]),
    ],
)
def test_modules_excluded_from_quantization(
    tmp_path: Path, name: str, field: str, patterns: object
) -> None:
    """Such modules may be unquantized; if they are quantized, a warning lists them."""
    model = written(tmp_path, name)
    edit_config(model, quantization_config=section(model) | {field: patterns})
    target = read_target(model, strict=False)
    (warning,) = [w for w in target.warnings if "leaves out" in w]
    assert f"leaves out {MODULE}, which" in warning
    plain = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))

    def store(tensors: Tensors) -> None:
        for other in [key for key in tensors if key.startswith(f"{MODULE}.")]:
            del tensors[other]
        tensors[f"{MODULE}.weight"] = plain

    edit_tensors(model, store)
    target = read_target(model, strict=False)
    assert not [w for w in target.warnings if "leaves out" in w]
    assert torch.equal(target.tensors[f"{MODULE}.weight"].load(), plain)
    assert target.source_types["model.layers.N.mlp.up_proj.weight"]["F32"] == 1


def test_modules_with_separate_settings(tmp_path: Path) -> None:
    """A group of config_groups with a regular expression, and ``dynamic`` of GPTQModel."""
    for place, (name, other, field, change_of) in enumerate(
        [
            (W4, "compressed-tensors w8a8", "config_groups", lambda s: s["config_groups"] | {
                "group_1": s["config_groups"]["group_0"] | {
                    "targets": [r"re:.*1\.mlp\.up_proj$"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}),
            ("gptq", "gptq version 2 of 8 bits, ordered", "dynamic",
             lambda _: {r"+:model\.layers\.1\.mlp\.up": {"bits": 8, "desc_act": True}}),
        ]
    ):  # fmt: skip
        folders = [tmp_path / f"{place}a", tmp_path / f"{place}b"]
        model, source = written(folders[0], name), written(folders[1], other)
        stored: Tensors = {}
        edit_tensors(source, stored.update)
        edit_tensors(model, lambda t, s=stored: _replace_module(t, s))
        edit_config(model, quantization_config=section(model) | {field: change_of(section(model))})
        weight = read_target(model, strict=True).tensors[f"{MODULE}.weight"]
        assert weight.quantized is not None and weight.quantized.form.bits == 8
        twin = read_target(source, strict=True).tensors[f"{MODULE}.weight"]
        if name == W4:
            assert torch.equal(weight.load(), twin.load())
        else:  # Version 1 stores zero points minus one.
            assert weight.load().shape == twin.load().shape


def _replace_module(tensors: Tensors, others: Tensors) -> None:
    for key in [key for key in tensors if key.startswith(f"{MODULE}.")]:
        del tensors[key]
    tensors.update({k: t for k, t in others.items() if k.startswith(f"{MODULE}.")})


def test_scales_of_caches_are_ignored_with_a_warning(tmp_path: Path) -> None:
    model = written(tmp_path, "compressed-tensors fp8 dynamic")
    scales = {f"model.layers.1.self_attn.{part}_scale": torch.ones(1) for part in "kv"}
    edit_tensors(model, lambda t: t.update(scales))
    warnings = read_target(model, strict=True).warnings
    assert "target: scales of quantized KV caches (*.k_scale, *.v_scale) are not used" in warnings
