"""Training of latents and indexers on the GPU: the CPU's losses in fp32, and nearly in bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_target
from latent_files import write_latents

from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.heads.attention import AttentionInputs, attend
from specbuild.builder.training.heads.options import IndexerTraining, LatentTraining
from specbuild.builder.training.heads.train_indexers import train_indexers
from specbuild.builder.training.heads.train_latents import train_latents


@pytest.fixture(autouse=True)
def exact_products() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("window", [0, 32])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)])
def test_fused_attention_equals_explicit_attention(
    window: int, dtype: torch.dtype, near: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, 128, 64, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, 2, 128, 64, generator=generator).to(dtype)
    sinks = torch.randn(8, generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        parts = [x.detach().to(device, copy=True).requires_grad_() for x in (q, k, v)]
        out = attend(AttentionInputs(*parts, sinks.to(device), 0.125, window))
        out.float().square().sum().backward()
        results.append([out.float().cpu(), *(part.grad.float().cpu() for part in parts)])
    for expected, result in zip(*results, strict=True):
        assert (result - expected).norm() < near * expected.norm()


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_losses_equal_those_on_the_cpu(tmp_path: Path, dtype: str, near: float) -> None:
    model, text = tmp_path / "target", tmp_path / "ids.npy"
    write_target(model, layers=2, hidden=64, vocab=64)
    write_latents(model, {1: 24})
    np.save(text, np.random.default_rng(0).zipf(1.4, 3000) % 60 + 3)
    shared = {"model": model, "texts": (text,), "steps": 4, "batch_size": 4, "dtype": dtype}
    shared |= {"checkpointing": True, "sequence_length": 48, "held_out_fraction": 0.1}
    latents = LatentTraining(
        initial=model / "mla_kv.safetensors", lora_rank=2, output=tmp_path / "latents", **shared
    )
    indexers = IndexerTraining(
        heads=2, width=16, top_k=(8,), first_tokens=1, recent_tokens=3, joint_steps=2,
        output=tmp_path / "indexers", **shared,
    )  # fmt: skip
    for make, options in ((train_latents, latents), (train_indexers, indexers)):
        expected = make(options, SilentProgress())
        on_gpu = replace(options, device="cuda", output=tmp_path / f"{options.output.name}-gpu")
        result = make(on_gpu, SilentProgress())
        for one, two in zip(expected.losses, result.losses, strict=True):
            assert two.total == pytest.approx(one.total, rel=near)
        assert list(result.perplexities) == list(expected.perplexities)
