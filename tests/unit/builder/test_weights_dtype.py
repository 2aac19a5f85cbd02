"""``--weights-dtype``: the quantized tensors of a GPT-OSS, and the results of a CPU engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from checkpoint_files import edit_config, edit_tensors
from checkpoints import write_draft, write_target
from deepseek_checkpoints import write_deepseek
from fused_graphs import PAGE, blank_pools, fused_model, launch_feeds, run_graph
from latent_files import write_latents
from left_out import slow
from llama_checkpoints import write_llama
from mx_rounding import mx_rounded, round_checkpoint

from specbuild.builder.backends.cpu.lowering import cpu_passes
from specbuild.builder.build import build
from specbuild.builder.graph.passes.pipeline import GraphPass
from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.cli.compare.measurement import lossy_names
from specbuild.cli.main import main
from specbuild.plugins_cuda.linear.block_scaled import rounded
from specbuild.plugins_cuda.linear.storage import storage_named
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError

FORMS = pytest.mark.parametrize("dtype", ["fp8", "mxfp4"])
TOKENS = tuple(range(3, 31))
# Widths are multiples of blocks of 32 columns, as in kernels.
GPT_OSS: dict[str, Any] = {"layers": 4, "hidden": 64, "q_heads": 4, "head_dim": 32}


@FORMS
@pytest.mark.parametrize("columns", [32, 96])
def test_weights_are_rounded_to_the_format(dtype: str, columns: int) -> None:
    rng = torch.Generator().manual_seed(columns)
    weight = torch.randn(3, 40, columns, generator=rng) * 2.0 ** torch.randint(
        -30, 2, (3, 40, 1), generator=rng
    )
    weight[0, :5], weight[1, 3, 7] = 0, -0.0
    for of in (weight.bfloat16(), weight.bfloat16().float()):
        assert torch.equal(rounded(of, storage_named(dtype)), mx_rounded(of, dtype))
    # Other types are first rounded to bf16, and a block may be partial.
    short = rounded(weight[..., : columns - 5], storage_named(dtype))
    padded = weight.clone()
    padded[..., columns - 5 :] = 0
    assert torch.equal(short, mx_rounded(padded.bfloat16(), dtype).float()[..., : columns - 5])


@FORMS
def test_a_cuda_graph_equals_the_rounded_checkpoint(tmp_path: Path, dtype: str) -> None:
    """QKV, O and head are quantized.

    Routers, experts, sinks and norms are those of the checkpoint.
    """
    write_target(tmp_path, **GPT_OSS)
    logits = {}
    for form in ("bf16", dtype, "rounded"):
        if form == "rounded":
            edit_tensors(tmp_path, partial(round_checkpoint, name=dtype))
        dtype_option = "bf16" if form == "rounded" else form
        fused = fused_model(tmp_path, max_seq_len=64, page_size=PAGE, weights_dtype=dtype_option)
        model, rows = fused.models["target"], range(len(TOKENS))
        feeds = launch_feeds(model, rows, torch.tensor(rows)) | blank_pools(model)
        feeds["token_ids"] = torch.tensor(TOKENS, dtype=torch.int32)
        logits[form] = run_graph(model, feeds)["logits"]
        if form == dtype:
            assert coded_tensors(model, f".packed.{dtype}") == coded_names(4)
    assert torch.equal(logits[dtype], logits["rounded"])
    assert not torch.equal(logits[dtype], logits["bf16"])


def test_the_same_tensors_are_quantized_with_a_draft(tmp_path: Path) -> None:
    """With a draft, other nodes concatenate the captured states."""
    write_target(tmp_path / "target", **GPT_OSS)
    write_draft(tmp_path / "draft")
    fused = fused_model(
        tmp_path / "target", tmp_path / "draft", max_seq_len=64, page_size=PAGE, weights_dtype="fp8"
    )
    assert coded_tensors(fused.models["target"], ".packed.fp8") == coded_names(4)


def coded_names(layers: int) -> set[str]:
    """Return the names of the quantized tensors of a GPT-OSS."""
    parts = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    return {"lm_head.weight"} | {f"model.layers.{i}.{p}" for i in range(layers) for p in parts}


def coded_tensors(model: ir.Model, ending: str) -> set[str]:
    """Return the checkpoint's tensors from which weights with this suffix are built."""
    recipes = [recipe_of(v) for n, v in model.graph.initializers.items() if n.endswith(ending)]
    return {source for recipe in recipes if recipe is not None for source in recipe.sources}


CPU_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "dtype": "bfloat16"}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, "moe_intermediate_size": 32, "dtype": "bfloat16"}),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt-oss", "fp8"),
        *slow(("qwen3-moe", "mxfp4"), ("gpt-oss", "mxfp4"), ("llama, tied", "fp8")),
    ],
)
def test_a_cpu_engine_equals_the_rounded_checkpoint(tmp_path: Path, name: str, dtype: str) -> None:
    kind, changes = CPU_MODELS[name]
    model = tmp_path / "model"
    if kind == "gpt_oss":
        write_target(model, **changes)
    else:
        write_llama(model, kind, num_hidden_layers=2, **changes)
    tied = bool(changes.get("tie_word_embeddings"))
    result = scored(model, tmp_path / "coded", weights_dtype=dtype)
    plain = scored(model, tmp_path / "plain")
    edit_tensors(model, partial(round_checkpoint, name=dtype, experts=dtype == "mxfp4"))
    if tied:
        untie(model, dtype)
    expected = scored(model, tmp_path / "rounded")
    np.testing.assert_array_equal(result, expected)
    assert not np.array_equal(result, plain)


def untie(model: Path, dtype: str) -> None:
    """Give the model a separate head: the embedding is not rounded, the head is."""

    def head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = mx_rounded(tensors["model.embed_tokens.weight"], dtype)

    edit_tensors(model, head)
    edit_config(model, tie_word_embeddings=False)


def scored(model: Path, output: Path, **changes: Any) -> np.ndarray:
    """Return the logits [T, V] of a CPU engine with these options."""
    build(
        BuildOptions.from_flat(model=model, output=output, max_seq_len=64, **changes),
        SilentProgress(),
    )
    return np.concatenate([rows.logits for rows in Engine.load(output).decoder.score(TOKENS)])


def test_latents_and_routers_are_not_quantized_on_a_cpu(tmp_path: Path) -> None:
    """As in a CUDA engine, the query weight of a layer that caches latents is not quantized."""
    write_target(tmp_path, **GPT_OSS)
    write_latents(tmp_path, {1: 16}, kv_width=64)
    limits = {"max_seq_len": 64, "page_size": PAGE}
    cuda = fused_model(tmp_path, **limits, weights_dtype="fp8").models["target"]
    stays = {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"}
    expected = coded_names(4) - stays
    assert coded_tensors(cuda, ".packed.fp8") == expected
    result: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:

        def passes(role: str, **limits: Any) -> Any:
            def look(model: ir.Model) -> int:
                if role == "target":
                    result.update(coded_tensors(model, ".fp8"))
                return 0

            return (*cpu_passes(role, **limits), GraphPass("look", look))

        patch.setattr("specbuild.builder.backends.cpu.backend.cpu_passes", passes)
        scored(tmp_path, tmp_path / "engine", weights_dtype="fp8")
    assert result == expected


def test_an_engine_reports_quantized_weights_as_lossy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_target(tmp_path / "model", **GPT_OSS)
    scored(tmp_path / "model", tmp_path / "engine", weights_dtype="fp8")
    manifest = Engine.load(tmp_path / "engine").manifest
    assert (manifest.target.dtype, lossy_names(manifest)) == ("fp8", ("fp8 weights",))
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt_ids": [5, 6, 7]}\n')
    arguments = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "2"]
    assert main(["run", str(tmp_path / "engine"), *arguments]) == 0
    assert "weights: fp8 (lossy)" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "engine")]) == 0
    assert "fp8 (lossy)" in capsys.readouterr().out


def test_rejects_a_model_without_cuda_support(tmp_path: Path) -> None:
    write_deepseek(tmp_path / "mla")
    write_llama(tmp_path / "experts", "qwen3_moe", dtype="bfloat16")
    mixed = "experts in bf16 with other weights in fp8"
    for model, what in (("mla", "a deepseek_v3"), ("experts", mixed)):
        with pytest.raises(SpecbuildError, match=f"CUDA does not support {what}; remove the "):
            scored(tmp_path / model, tmp_path / "engine", weights_dtype="fp8")
