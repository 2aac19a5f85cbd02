"""Checkpoints in fp32 and fp16, for backends that compute in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import write_draft, write_target
from plan_host import lowered_engine
from safetensors.torch import load_file, save_file

from specbuild.builder.backends.cuda.backend import CUDA
from specbuild.builder.inputs import BuildInputs, read_checkpoints, settled_inputs
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.errors import SpecbuildError

SMALL = {
    "max_seq_len": 64, "max_batch_size": 1,
    "draft_top_k": 1, "draft_depth": 1, "draft_tokens": 1,
}  # fmt: skip


def write_pair(folder: Path, target: str, draft: str) -> None:
    write_target(folder / "target", layers=1, dtype=target)
    write_draft(folder / "draft", target_layers=1, aux_layers=(0,), own_embedding=True, dtype=draft)


def rounded_copy(folder: Path, into: Path) -> None:
    """Copy the checkpoint with every float tensor in bf16, by plain torch."""
    for name in ("target", "draft"):
        (into / name).mkdir(parents=True)
        for file in (folder / name).iterdir():
            (into / name / file.name).write_bytes(file.read_bytes())
        tensors = load_file(folder / name / "model.safetensors")
        halved = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
        save_file(halved, into / name / "model.safetensors")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a CUDA engine of these checkpoints stores."""
    lowered = lowered_engine(folder / "target", folder / "draft", **SMALL)
    return {name: recipe.checked() for name, recipe in lowered.weights.items()}


def inputs_of(folder: Path) -> tuple[BuildInputs, BuildOptions]:
    build_options = BuildOptions.from_flat(
        model=folder / "target", draft=folder / "draft", output=Path("e"), backend="cuda", **SMALL
    )
    return settled_inputs(
        build_options, CUDA, read_checkpoints(build_options, SilentProgress())
    ), build_options


@pytest.mark.parametrize(("target", "draft"), [("bf16", "f32"), ("f32", "f16"), ("f16", "bf16")])
def test_weights_equal_the_checkpoint_in_bf16(tmp_path: Path, target: str, draft: str) -> None:
    write_pair(tmp_path, target, draft)
    rounded_copy(tmp_path, tmp_path / "rounded")
    actual, desired = stored(tmp_path), stored(tmp_path / "rounded")
    assert actual.keys() == desired.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == desired[name].dtype, name
        assert torch.equal(tensor, desired[name]), name


def test_conversions_are_reported(tmp_path: Path) -> None:
    write_pair(tmp_path, "bf16", "f32")
    inputs, build_inputs = inputs_of(tmp_path)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    floats = {f"draft.{name}" for name, t in tensors.items() if t.dtype == torch.float32}
    assert {dtype: set(names) for dtype, names in inputs.sources.converted.items()} == {
        "F32": floats
    }
    assert any("F32" in note and "build_report.json" in note for note in inputs.notes(build_inputs))


def test_rejects_other_float_types(tmp_path: Path) -> None:
    write_pair(tmp_path, "bf16", "bf16")
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"] = tensors["fc.weight"].double()
    save_file(tensors, file)
    with pytest.raises(SpecbuildError, match=r"fc\.weight: got F64, expected BF16 or F16 or F32"):
        inputs_of(tmp_path)
