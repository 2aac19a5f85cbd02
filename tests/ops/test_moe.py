"""Moe against transformers' GPT-OSS experts, and its parts against loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from forms import moe_contrib, moe_dense, portable
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Experts,
    DeepseekV2TopkRouter,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Experts,
    DeepseekV3TopkRouter,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from specbuild.plugins_cuda.moe.contrib import cpu_form
from specbuild.plugins_cuda.moe.expert_weight import expert_weight
from specbuild.plugins_cuda.moe.op import route
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named

OP = op_named("Moe")
Run = Callable[[OpSpec, list[np.ndarray | None], dict[str, int]], list[np.ndarray]]


def by_reference(
    op: OpSpec, arrays: list[np.ndarray | None], attributes: dict[str, int]
) -> list[np.ndarray]:
    tensors = [None if a is None else torch.from_numpy(a) for a in arrays]
    return [op.reference(*tensors, **op.complete(attributes)).numpy()]


@pytest.mark.parametrize("run", [by_reference, portable, moe_dense, moe_contrib])
@pytest.mark.parametrize(("rows", "top_k", "x_scale"), [(1, 2, 1.0), (9, 3, 1.0), (5, 5, 30.0)])
def test_equals_gpt_oss_in_transformers(run: Run, rows: int, top_k: int, x_scale: float) -> None:
    torch.manual_seed(rows)
    config = GptOssConfig(
        hidden_size=48, intermediate_size=32, num_local_experts=5, num_experts_per_tok=top_k
    )
    router, experts = GptOssTopKRouter(config), GptOssExperts(config)
    with torch.no_grad():
        for parameter in (*router.parameters(), *experts.parameters()):
            parameter.normal_(std=0.3)
        x = torch.randn(rows, 48) * x_scale
        logits, weights, chosen = router(x)
        expected = experts(x, chosen, weights).numpy()
    bf = {name: p.detach().numpy() for name, p in experts.named_parameters()}
    arrays = [
        x.numpy(),
        logits.numpy(),
        bf["gate_up_proj"],
        None,
        bf["gate_up_proj_bias"],
        bf["down_proj"],
        None,
        bf["down_proj_bias"],
        None,
    ]
    result = run(OP, arrays, {"top_k": top_k})[0]
    np.testing.assert_allclose(result, expected, atol=1e-4 * x_scale, rtol=1e-5)


@pytest.mark.parametrize("run", [by_reference, portable, moe_dense, moe_contrib])
@pytest.mark.parametrize(
    ("groups", "groups_chosen", "normalised"), [(4, 2, True), (2, 1, False), (1, 1, True)]
)
def test_equals_deepseek_in_transformers(
    run: Run, groups: int, groups_chosen: int, normalised: bool
) -> None:
    torch.manual_seed(groups)
    config = DeepseekV3Config(
        hidden_size=48, moe_intermediate_size=24, n_routed_experts=16, num_experts_per_tok=3,
        n_group=groups, topk_group=groups_chosen, norm_topk_prob=normalised,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router, experts = DeepseekV3TopkRouter(config), DeepseekV3Experts(config)
    with torch.no_grad():
        for parameter in (*router.parameters(), *experts.parameters()):
            parameter.normal_(std=0.3)
        router.e_score_correction_bias.normal_()
        x = torch.randn(21, 48)
        logits, weights, chosen = router(x)
        expected = experts(x, chosen, weights).numpy()
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        gate_up = torch.stack([gate, up], dim=2).flatten(1, 2).transpose(1, 2)
        down = experts.down_proj.transpose(1, 2)
    arrays = [x, logits, gate_up, None, None, down, None, None, router.e_score_correction_bias]
    attributes = {
        "top_k": 3,
        "gating": "sigmoid_norm" if normalised else "sigmoid",
        "activation": "swiglu",
        "groups": groups,
        "groups_chosen": groups_chosen,
        "scaling": 2.5,
    }
    given = [None if a is None else a.detach().contiguous().numpy() for a in arrays]
    np.testing.assert_allclose(run(OP, given, attributes)[0], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("run", [by_reference, portable, moe_dense, moe_contrib])
@pytest.mark.parametrize(("groups", "groups_chosen", "top_k"), [(1, 1, 3), (4, 2, 5), (16, 3, 2)])
def test_equals_deepseek_v2_in_transformers(
    run: Run, groups: int, groups_chosen: int, top_k: int
) -> None:
    torch.manual_seed(groups)
    config = DeepseekV2Config(
        hidden_size=48, moe_intermediate_size=24, n_routed_experts=16, num_experts_per_tok=top_k,
        n_group=groups, topk_group=groups_chosen, routed_scaling_factor=16.0,
        topk_method="greedy" if groups == 1 else "group_limited_greedy", num_attention_heads=4,
    )  # fmt: skip
    router, experts = DeepseekV2TopkRouter(config), DeepseekV2Experts(config)
    with torch.no_grad():
        for parameter in (*router.parameters(), *experts.parameters()):
            parameter.normal_(std=0.3)
        x = torch.randn(21, 48)
        logits, weights, chosen = router(x)
        expected = experts(x, chosen, weights).numpy()
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        gate_up = torch.stack([gate, up], dim=2).flatten(1, 2).transpose(1, 2)
        down = experts.down_proj.transpose(1, 2)
    arrays = [x, logits, gate_up, None, None, down, None, None, None]
    attributes = {
        "top_k": top_k,
        "gating": "softmax_topk",
        "activation": "swiglu",
        "groups": groups,
        "groups_chosen": groups_chosen,
        "group_score": "max",
        "scaling": 16.0,
    }
    given = [None if a is None else a.detach().contiguous().numpy() for a in arrays]
    np.testing.assert_allclose(run(OP, given, attributes)[0], expected, atol=1e-4, rtol=1e-5)


def test_rejects_an_unknown_group_score() -> None:
    with pytest.raises(ValueError, match="unknown group_score 'mean'"):
        route(torch.zeros(1, 4), 1, "sigmoid", groups=2, groups_chosen=1, group_score="mean")


def test_mxfp4_weights_equal_a_loop_over_nibbles() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 3, 2, 16)).astype(np.uint8)
    scales = rng.integers(100, 140, (2, 3, 2)).astype(np.uint8)
    result = expert_weight(torch.from_numpy(blocks), torch.from_numpy(scales))
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert result.shape == (2, 64, 3)
    for expert in range(2):
        for column in range(3):
            for element in range(64):
                block, place = divmod(element, 32)
                byte = int(blocks[expert, column, block, place // 2])
                nibble = byte >> 4 if place % 2 else byte & 15
                value = magnitudes[nibble % 8] * (-1) ** (nibble // 8)
                expected = math.ldexp(value, int(scales[expert, column, block]) - 127)
                assert result[expert, element, column] == expected


def test_a_router_tie_selects_the_lower_expert() -> None:
    weights = route(
        torch.tensor([[1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]), 2, "softmax_selected"
    )
    assert weights.bool().tolist() == [[True, True, False, False], [True, True, False, False]]


@pytest.mark.parametrize("gating", ["softmax_selected", "softmax_topk", "sigmoid_norm"])
def test_gating_equals_its_formula(gating: str) -> None:
    row = [0.4, -1.2, 2.2, 0.9]
    chosen = [2, 3]
    raw = {
        "softmax_selected": [math.exp(row[e]) for e in chosen],
        "sigmoid_norm": [1 / (1 + math.exp(-row[e])) for e in chosen],
        "softmax_topk": [math.exp(row[e]) for e in chosen],
    }[gating]
    total = sum(map(math.exp, row)) if gating == "softmax_topk" else sum(raw)
    expected = [0.0, 0.0, raw[0] / total, raw[1] / total]
    assert route(torch.tensor([row]), 2, gating)[0].tolist() == pytest.approx(expected)


@given(data=st.data(), group_score=st.sampled_from(["sum_of_two", "max"]))
@settings(max_examples=60, deadline=None)
def test_group_selection_equals_a_loop(data: st.DataObject, group_score: str) -> None:
    """Draw scores from a coarse grid: groups and experts tie, and the lower index wins."""
    groups = data.draw(st.integers(1, 4), "groups")
    size = data.draw(st.integers(2, 4), "experts of a group")
    num_chosen = data.draw(st.integers(1, groups), "groups chosen")
    top_k = data.draw(st.integers(1, num_chosen * size), "top k")
    grid = st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.5]), min_size=size, max_size=size)
    row = [value for _ in range(groups) for value in data.draw(grid, "logits")]
    bias = [value for _ in range(groups) for value in data.draw(grid, "bias")]
    weights = route(
        torch.tensor([row]), top_k, "sigmoid", torch.tensor(bias),
        groups=groups, groups_chosen=num_chosen, group_score=group_score, scaling=2.0,
    )[0].tolist()  # fmt: skip
    sigmoid = torch.tensor(row).sigmoid().tolist()
    score = (torch.tensor(row).sigmoid() + torch.tensor(bias)).tolist()
    of_group = [range(size * group, size * (group + 1)) for group in range(groups)]
    summed = {"sum_of_two": 2, "max": 1}[group_score]
    sums = [
        float(torch.tensor(sorted(score[e] for e in members)[-summed:]).flip(0).sum())
        for members in of_group
    ]
    best = sorted(range(groups), key=lambda group: (-sums[group], group))[:num_chosen]
    open_ = sorted(e for group in best for e in of_group[group])
    chosen = sorted(open_, key=lambda e: (-score[e], e))[:top_k]
    expected = [2 * sigmoid[e] if e in chosen else 0.0 for e in range(len(row))]
    assert weights == pytest.approx(expected)


def test_wide_layers_skip_unselected_experts() -> None:
    assert cpu_form(8, 32) == "dense"
    assert cpu_form(8, 64) == "dense"
    assert cpu_form(8, 128) == "contrib"
