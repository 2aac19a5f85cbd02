"""The experts that RmsMoe's kernels select are those of Moe's definition, with ties and groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from deepseek_requests import routed_request
from emulation import Guarded, emulate, guarded, has_compiler

from specbuild.plugins_cuda.moe.op import route
from specbuild.plugins_cuda.rms_moe.cases import (
    DEEPSEEK_V3,
    GLM_FLASH,
    KIMI_K2,
    QWEN3_NEXT,
    QWEN35_MOE,
    V2_LITE,
    Layer,
)
from specbuild.plugins_cuda.rms_moe.op import OP

DRAWS = 12
LAYERS: dict[str, Layer] = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V2": replace(V2_LITE, experts=160, groups=8, groups_chosen=3, scaling=16.0),
    "DeepSeek-V2-Lite": V2_LITE,
    "Kimi-K2": KIMI_K2,
    "Qwen3-Next": QWEN3_NEXT, "Qwen3.5": QWEN35_MOE,
    "GLM-4.7-Flash": GLM_FLASH,
    "sigmoids of groups that share sets of 32": replace(
        DEEPSEEK_V3, experts=60, groups=5, groups_chosen=2, gating="sigmoid", shared=0
    ),
    "a softmax over the chosen, in groups": replace(
        V2_LITE, experts=30, groups=3, groups_chosen=1, gating="softmax_selected",
        group_score="sum_of_two",
    ),
}  # fmt: skip


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
@pytest.mark.parametrize("name", LAYERS)
def test_a_prompt_row_selects_the_experts_of_the_definition(name: str) -> None:
    """The logits are the router's bias, which has few values: experts tie, and groups too."""
    layer = replace(LAYERS[name], rows=1, hidden=32, inner=32)
    assert OP.lower is not None
    lowering = OP.lower(replace(routed_request(layer), phase="prefill"))
    sizes = {workspace.name: workspace.nbytes for workspace in lowering.workspaces}
    rng = np.random.default_rng(6)
    selected = set()
    for _ in range(DRAWS):
        logits = rng.choice(np.float32([-1.0, 0.25, 0.5, 2.0]), layer.experts)
        bias = rng.choice(np.float32([0.0, 0.125, 0.75]), layer.experts)
        gates = rng.choice(np.float32([-1.5, 0.5]), layer.shared * layer.shared_gates)
        router_bias = np.concatenate([logits, gates])
        memory = {
            "x": guarded(bf16_bits(np.ones((1, 32), np.float32))),
            "norm": guarded(bf16_bits(np.ones(32, np.float32))),
            "router_weight": guarded(bf16_bits(np.zeros((len(router_bias), 32), np.float32))),
            "router_bias": guarded(bf16_bits(router_bias)),
            "choice_bias": guarded(bias),
            "row_start": guarded(np.array([0, 1, 1], np.int32)),
            **{name: Guarded(nbytes) for name, nbytes in sizes.items()},
        }
        emulate(lowering.launches[0], memory)
        assert all(place.untouched() for place in memory.values())
        chosen = memory["workspace_chosen"].data.view(np.int32)
        shares = memory["workspace_shares"].data.view(np.float32)
        weights = route(
            torch.from_numpy(logits)[None], layer.top_k, layer.gating,
            torch.from_numpy(bias) if layer.choice_bias else None, groups=layer.groups,
            groups_chosen=layer.groups_chosen, group_score=layer.group_score,
            scaling=layer.scaling,
        )[0]  # fmt: skip
        every = list(range(layer.experts, layer.packed))
        assert chosen.tolist() == torch.nonzero(weights)[:, 0].tolist() + every
        of_shared = 1 / (1 + np.exp(-gates)) if layer.shared_gates else np.ones(layer.shared)
        expected = np.append(weights[weights != 0].numpy(), of_shared)
        np.testing.assert_allclose(shares, expected, rtol=1e-6)
        selected.add(tuple(chosen.tolist()))
    assert len(selected) > DRAWS // 2
