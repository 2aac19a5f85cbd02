"""Synthetic checkpoints with quantized weights can be read, and follow the same rules."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from synthetic_models import OUTPUT_TOKENS, run, successors, written_prompts

from specbuild.builder.build import build
from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.gguf_file import has_more_bits
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.synth import build_engine, write_checkpoints
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError

FORMATS = {"int4-g128": "int4 g128", "fp8-block": "fp8 128x128", "nvfp4": "nvfp4"}


def model(name: str | None, geometry: str = "tiny-llama", **changes: object) -> SynthModel:
    options = {"prompts": 3, "prompt_tokens": 8, "acceptance": 0.7, **changes}
    return SynthModel(SynthOptions(geometry, weights_format=name, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_checkpoints_follow_their_rules(tmp_path: Path, name: str) -> None:
    synthetic = model(name)
    write_checkpoints(synthetic, tmp_path / "out", SilentProgress(), force=False)
    target = tmp_path / "out" / "target"
    read = read_target(target, strict=True)
    plain = model(None).target_tensors
    for key, tensor in read.tensors.items():
        if ".layers." not in key or len(tensor.shape) != 2:
            assert tensor.quantized is None
            continue
        assert tensor.quantized is not None and tensor.quantized.form.name == FORMATS[name]
        # As large as in the bf16 model.
        ratio = tensor.load().std() / plain[key].load().float().std()
        assert math.isclose(ratio, 1, rel_tol=0.25), key
    engine = tmp_path / "engine"
    build(BuildOptions(model=target, output=engine), SilentProgress())
    after, _ = successors(synthetic)
    for prompt, record in zip(
        prompts := written_prompts(tmp_path / "out" / "prompts.jsonl"),
        run(Engine.load(engine), prompts, None),
        strict=True,
    ):
        token = prompt.prompt_ids[-1] if prompt.prompt_ids else 0
        for output in record.output_ids[:OUTPUT_TOKENS]:
            token = after[token]
            assert output == token


TWINS = {"token_embd": EMBEDDING, "output": HEAD}
STEMS = {
    "attn_q": "self_attn.q_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MIXTURES = {"q8_0": {"Q8_0": 3}, "q4_k_m": {"Q4_K": 2, "Q6_K": 1}}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("geometry", ["tiny-llama", "tiny-qwen3"])
def test_gguf_files_are_read_by_gguf_py_and_follow_their_rules(
    tmp_path: Path, name: str, geometry: str
) -> None:
    synthetic = model(name, geometry)
    write_checkpoints(synthetic, tmp_path / "out", SilentProgress(), force=False)
    file = tmp_path / "out" / "target" / "model.gguf"
    kinds: dict[str, Counter[str]] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        stem = tensor.name.removesuffix(".weight").rpartition(".")[2]
        kind = tensor.tensor_type.name
        kinds.setdefault(stem, Counter())[kind] += 1
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if stem in TWINS:  # the stored values, rounded
            expected = synthetic.target_tensors[TWINS[stem]].load().float().numpy()
            error = np.abs(values - expected).max() / np.abs(expected).max()
            assert error < {"Q4_K": 0.07, "Q6_K": 0.04, "Q8_0": 0.005}[kind]
        elif stem in STEMS:
            layer = tensor.name.split(".")[1]
            twin = synthetic.target_tensors[f"model.layers.{layer}.{STEMS[stem]}.weight"]
            assert twin.std is not None
            assert math.isclose(values.std(), twin.std, rel_tol=0.1), tensor.name
            assert abs(values.mean()) < 0.05 * twin.std, tensor.name
    assert kinds["attn_v"] == kinds["ffn_down"] == MIXTURES[name]
    assert kinds["attn_q"] == {"Q8_0" if name == "q8_0" else "Q4_K": 3}
    assert kinds["output"] == {"Q8_0" if name == "q8_0" else "Q6_K": 1}
    assert kinds["attn_norm"] == {"F32": 3}
    engine = tmp_path / "engine"
    build(BuildOptions(model=file, output=engine), SilentProgress())
    prompts = written_prompts(tmp_path / "out" / "prompts.jsonl")[:1]
    (record,) = run(Engine.load(engine), prompts, None)
    after, _ = successors(synthetic)
    assert list(record.output_ids[1:]) == [after[token] for token in record.output_ids[:-1]]


@pytest.mark.parametrize(("layers", "count"), [(32, 16), (80, 40)])
def test_half_of_the_layers_of_llama_have_more_bits(layers: int, count: int) -> None:
    """As in the published Q4_K_M files of Llama-3.1-8B and Llama-3.3-70B."""
    assert sum(has_more_bits(layer, layers) for layer in range(layers)) == count


def test_experts_are_stacked_in_one_tensor(tmp_path: Path) -> None:
    synthetic = model("q8_0", "tiny-qwen3-moe", acceptance=None)
    write_checkpoints(synthetic, tmp_path / "out", SilentProgress(), force=False)
    read = read_target(tmp_path / "out" / "target" / "model.gguf", strict=True)
    assert read.geometry.moe == synthetic.target.moe
    assert read.source_types["blk.N.ffn_up_exps.weight"] == {"Q8_0": 3}
    assert read.source_types["blk.N.ffn_gate_inp.weight"] == {"F32": 3}


def test_rejects_models_without_a_gguf_architecture(tmp_path: Path) -> None:
    with pytest.raises(SpecbuildError, match="q8_0 needs --output"):
        model("q8_0", acceptance=None).checkpoints()
    with pytest.raises(SpecbuildError, match="no GGUF file is written of a phi3"):
        write_checkpoints(
            model("q8_0", "tiny-phi3"), tmp_path / "out", SilentProgress(), force=False
        )
    with pytest.raises(SpecbuildError, match="as Q4_K, in blocks of 256, but its rows have 64"):
        write_checkpoints(
            model("q4_k_m", "tiny-qwen3-moe"), tmp_path / "out", SilentProgress(), force=False
        )
    assert not (tmp_path / "out").exists()


def test_an_engine_equals_that_of_the_checkpoint(tmp_path: Path) -> None:
    synthetic = model("int4-g128", "tiny-qwen3", acceptance=None)
    write_checkpoints(synthetic, tmp_path / "out", SilentProgress(), force=False)
    read = tmp_path / "read"
    build(BuildOptions(model=tmp_path / "out" / "target", output=read), SilentProgress())
    options = BuildOptions(model=Path("tiny-qwen3"), output=tmp_path / "engine")
    report, _ = build_engine(synthetic, options, SilentProgress())
    assert report.source_types["model.layers.N.mlp.up_proj.weight"] == {"int4 g128": 3}
    weights = [
        (folder / "weights.safetensors").read_bytes() for folder in (read, tmp_path / "engine")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("geometry", "name", "message"),
    [
        ("tiny", "nvfp4", "tiny stores experts in MXFP4 as released"),
        ("tiny-qwen3-moe", "int4-g128", "stores groups of 128 inputs, but model.layers.0.mlp.exp"),
    ],
)
def test_rejects_formats_that_the_model_does_not_support(
    geometry: str, name: str, message: str
) -> None:
    with pytest.raises(SpecbuildError) as error:
        assert model(name, geometry, acceptance=None).target_tensors
    assert message in str(error.value)
