"""Features that engines of several ranks do not support are rejected by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from geometries import GPT_OSS_20B
from llama_checkpoints import write_llama
from plan_host import fused_engine

from specbuild.builder.backends.cuda.shard.require import require_shared_modes, require_shares
from specbuild.runtime.engine_dir.feed_forward import DenseFeedForward, Geglu
from specbuild.runtime.engine_dir.geometry import (
    LINEAR_ATTENTION,
    GatedDelta,
    LayerInputs,
    Multipliers,
    Rope,
    WindowHeads,
)
from specbuild.runtime.errors import SpecbuildError

ATTENTION = GPT_OSS_20B.attention
STATES = GatedDelta(key_heads=16, value_heads=32, key_width=128, value_width=128, taps=4)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"gated_delta": STATES, "layer_types": (LINEAR_ATTENTION, "full_attention") * 12},
         "has 12 layers with a recurrent state (gated delta nets)"),
        ({"attention": replace(ATTENTION, output_gate=True)},
         "multiplies the output of attention by a gate"),
        ({"attention": replace(ATTENTION, qk_norm="all_heads")},
         "normalizes the queries of all heads together before RoPE"),
        ({"attention": replace(ATTENTION, value_norm=True)}, "normalizes values"),
        ({"window_heads": WindowHeads(kv_heads=16, head_dim=64)},
         "has 16 KV heads of 64 in layers with a window, 8 of 64 in others"),
        ({"shared_caches": 4}, "has 4 layers that read keys and values of other layers"),
        ({"layer_inputs": LayerInputs(width=64, vocab=1000)},
         "has an additional embedding for each layer"),
        ({"window_rope": Rope(theta=1e4)},
         "rotates keys of layers with a window by another RoPE"),
        ({"norm_places": "both"}, "normalizes the outputs of attention and feed-forward"),
        ({"multipliers": Multipliers(embedding=12.0)},
         "multiplies embeddings, residuals or logits by constants"),
        ({"feed_forwards": (DenseFeedForward(inner=5760, activation=Geglu()),)},
         "has a feed-forward with GELU"),
    ],
)  # fmt: skip
def test_rejects_hybrids_and_gemma(changes: dict[str, Any], part: str) -> None:
    require_shares(GPT_OSS_20B, 2)
    expected = (
        f"--tensor-parallel 2: the model {part}, which several GPUs do not support; "
        "remove --tensor-parallel"
    )
    with pytest.raises(SpecbuildError, match=f"^{re.escape(expected)}$"):
        require_shares(replace(GPT_OSS_20B, **changes), 2)


def test_rejects_trained_latents() -> None:
    expected = "--tensor-parallel 4: trained latents (mla_kv.safetensors) do not support several"
    with pytest.raises(SpecbuildError, match=re.escape(expected)):
        require_shares(replace(GPT_OSS_20B, latent_dims=(512,) * 24), 4)


@pytest.mark.parametrize(("field", "flag"), [("specpv", "--specpv"), ("dsa", "--dsa")])
def test_rejects_modes_of_one_gpu(tmp_path: Path, field: str, flag: str) -> None:
    write_llama(tmp_path, num_hidden_layers=1)
    _, engine_sizes = fused_engine(tmp_path, None, max_seq_len=64, max_batch_size=1, page_size=16)
    with_mode: Any = {field: object()}
    require_shared_modes(replace(engine_sizes, **with_mode))
    expected = f"--tensor-parallel 2 and {flag}: not supported together; remove one of the options"
    with pytest.raises(SpecbuildError, match=f"^{re.escape(expected)}$"):
        require_shared_modes(replace(engine_sizes, ranks=2, **with_mode))
