"""Feed-forward layers of DeepSeek and related families after the CUDA passes: ops and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from family_geometries import DEEPSEEK_V2_LITE, DEEPSEEK_V3, GLM_47_FLASH
from fused_graphs import run_graph
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteMoE

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.cuda.lowering import cuda_passes
from specbuild.builder.families.parts.graph_io import InputPort
from specbuild.builder.families.parts.llama import LlamaNorm
from specbuild.builder.families.parts.mla_layer import feed_forward_module
from specbuild.builder.graph.export import GraphDeclaration, export_module
from specbuild.builder.graph.passes.pipeline import run_passes
from specbuild.builder.graph.passes.weights import Recipe, bind_weight
from specbuild.plugins_cuda.linear.block_scaled import mxfp4_blocks
from specbuild.plugins_cuda.moe.expert_weight import expert_weight
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    Swiglu,
)
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

HIDDEN, INNER, EPS, ROWS = 64, 32, 1e-5, 29
ROUTED = ["RmsMoe"]
DENSE = ["RmsSwiglu", "Linear"]
BIAS = "mlp.gate.e_score_correction_bias"
Weights = dict[str, torch.Tensor]


def experts(**changes: Any) -> MoeFeedForward:
    """Return the routing of DeepSeek-V3 with 16 experts."""
    fields: dict[str, Any] = {
        "experts": 16, "experts_per_token": 3, "inner": INNER, "storage": "bf16",
        "activation": Swiglu(), "gating": "sigmoid_norm", "choice_bias": True, "groups": 4,
        "groups_chosen": 2, "scaling": 2.5,
    }  # fmt: skip
    return MoeFeedForward(**{**fields, **changes})


def beside(moe: MoeFeedForward, inner: int) -> BothFeedForward:
    return BothFeedForward(dense=DenseFeedForward(inner=inner, activation=Swiglu()), moe=moe)


GLM = experts(groups=1, groups_chosen=1, scaling=1.8, experts_per_token=4)
ODD = "shared experts of another width"
V2 = experts(gating="softmax_topk", choice_bias=False, group_score="max", scaling=16.0)
V2_LITE = experts(
    gating="softmax_topk", choice_bias=False, group_score="max", scaling=1.0, groups=1,
    groups_chosen=1,
)  # fmt: skip
LAYERS: dict[str, tuple[FeedForward, list[str]]] = {
    "deepseek_v3": (beside(experts(), INNER), ROUTED),
    "deepseek_v3 of sigmoids": (beside(experts(gating="sigmoid"), INNER), ROUTED),
    "deepseek_v2": (beside(V2, 2 * INNER), ROUTED),
    "deepseek_v2 without groups": (beside(V2_LITE, 2 * INNER), ROUTED),
    "glm4_moe_lite": (beside(GLM, INNER), ROUTED),
    "three shared experts": (beside(experts(), 3 * INNER), ROUTED + DENSE),
    ODD: (beside(experts(inner=64), 96), ROUTED + DENSE),
    "no shared experts": (experts(), ROUTED),
    "dense": (DenseFeedForward(inner=96, activation=Swiglu()), DENSE),
}
SHARED = {name: 1 + name.startswith("deepseek_v2") for name in LAYERS} | {"no shared experts": 0}


class Layer(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self, feed_forward: FeedForward) -> None:
        super().__init__()
        self.norm, self.mlp = LlamaNorm(HIDDEN, EPS), feed_forward_module(HIDDEN, feed_forward)

    def forward(self, x: torch.Tensor, row_start: torch.Tensor) -> tuple[torch.Tensor]:
        del row_start
        return (x + self.mlp(self.norm(x)),)


@dataclass(frozen=True)
class Fused:
    """A layer's graph after the passes."""

    model: ir.Model

    def run(self, x: torch.Tensor) -> torch.Tensor:
        feeds = {"x": x, "row_start": torch.tensor([0, len(x)], dtype=torch.int32)}
        return run_graph(self.model, feeds)["y"]


def drawn(feed_forward: FeedForward) -> Weights:
    """Return random bf16 weights; the routing bias is fp32 and needs its low bits."""
    generator = torch.Generator().manual_seed(3)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Layer(feed_forward).named_parameters()}
    weights = {
        name: (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }
    if BIAS in weights:
        weights[BIAS] = 4 + 0.02 * torch.randn(weights[BIAS].shape, generator=generator)
    return weights


def fused(feed_forward: FeedForward, weights: Weights, weights_dtype: str = "bf16") -> Fused:
    declaration = GraphDeclaration(
        "target",
        (
            InputPort("x", torch.bfloat16, ("T", HIDDEN)),
            InputPort("row_start", torch.int32, ("B1",)),
        ),
        ("y",),
        (("T", HIDDEN),),
    )
    with torch.device("meta"):
        module = Layer(feed_forward).bfloat16()
    model = export_module(module, declaration, tuple)
    for name, value in list(model.graph.initializers.items()):
        tensor = weights[name]
        recipe = Recipe(tuple(tensor.shape), tensor.dtype, (name,), lambda tensor=tensor: tensor)
        bind_weight(model.graph, value, recipe)
    passes = cuda_passes("target", draft_dtype="bf16", weights_dtype=weights_dtype)
    run_passes("target", model, passes, None)
    return Fused(model)


def transformers_module(moe: MoeFeedForward, shared: int) -> nn.Module:
    """Return transformers' module with these sizes."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN, "moe_intermediate_size": moe.inner, "n_shared_experts": shared,
        "n_routed_experts": moe.experts, "num_experts_per_tok": moe.experts_per_token,
        "n_group": moe.groups, "topk_group": moe.groups_chosen, "num_attention_heads": 4,
        "routed_scaling_factor": moe.scaling, "norm_topk_prob": moe.gating == "sigmoid_norm",
    }  # fmt: skip
    if moe.gating == "softmax_topk":
        method = "greedy" if moe.groups == 1 else "group_limited_greedy"
        return DeepseekV2Moe(DeepseekV2Config(**sizes, topk_method=method))
    if moe is GLM:
        return Glm4MoeLiteMoE(Glm4MoeLiteConfig(**sizes))
    return DeepseekV3MoE(DeepseekV3Config(**sizes))


def by_transformers(feed_forward: BothFeedForward, weights: Weights, x: torch.Tensor) -> Any:
    """Return transformers' result for normed rows, in fp32."""
    module = transformers_module(
        feed_forward.moe, feed_forward.dense.inner // feed_forward.moe.inner
    ).float()
    tensors = {name.removeprefix("mlp."): w.float() for name, w in weights.items()}
    gate_up = tensors.pop("experts.gate_up_proj").transpose(1, 2)
    state: Mapping[str, torch.Tensor] = {
        "experts.gate_up_proj": torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1),
        "experts.down_proj": tensors.pop("experts.down_proj").transpose(1, 2),
        **{name: weight for name, weight in tensors.items() if name != "norm.weight"},
    }
    module.load_state_dict(state)
    with torch.no_grad():
        return module(rms_norm(x, weights["norm.weight"], EPS, "llama").float()[None])[0]


def rows() -> torch.Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(8)).bfloat16()


@pytest.mark.parametrize("name", LAYERS)
def test_ops_of_a_fused_feed_forward(name: str) -> None:
    feed_forward, ops = LAYERS[name]
    nodes = {node.op_type: node for node in fused(feed_forward, drawn(feed_forward)).model.graph}
    assert sorted(nodes) == sorted(ops)
    if "RmsMoe" in nodes:
        attributes = {name: each.value for name, each in nodes["RmsMoe"].attributes.items()}
        assert attributes["logits"] == "fp32"
        assert attributes["shared"] == (SHARED[name] if ops == ROUTED else 0)
    if len(nodes) == 3:
        assert nodes["Linear"].inputs[3] is nodes["RmsMoe"].outputs[0]


@pytest.mark.parametrize(
    "name", [n for n in LAYERS if n not in (ODD, "dense", "no shared experts")]
)
def test_a_fused_feed_forward_equals_transformers(name: str) -> None:
    feed_forward, _ = LAYERS[name]
    assert isinstance(feed_forward, BothFeedForward)
    weights, x = drawn(feed_forward), rows()
    expected = x.float() + by_transformers(feed_forward, weights, x)
    torch.testing.assert_close(
        fused(feed_forward, weights).run(x).float(), expected, rtol=2**-6, atol=2**-6
    )


def test_the_routing_bias_is_not_rounded() -> None:
    """In bf16, all biases near 4 would be one of three values."""
    feed_forward, _ = LAYERS["deepseek_v3"]
    weights, x = drawn(feed_forward), rows()
    exact = fused(feed_forward, weights).run(x)
    rounded = fused(feed_forward, {**weights, BIAS: weights[BIAS].bfloat16().float()}).run(x)
    assert ((exact != rounded).any(dim=1)).sum() > ROWS / 2


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_experts_in_mxfp4_equal_rounded_ones(name: str) -> None:
    feed_forward, _ = LAYERS[name]
    weights, x = drawn(feed_forward), rows()
    coded = fused(feed_forward, weights, "mxfp4")
    moe = next(node for node in coded.model.graph if node.op_type == "RmsMoe")
    assert [value.dtype for value in moe.inputs if value.name.endswith(".mxfp4")] == [
        ir.DataType.UINT8
    ] * 2

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return expert_weight(*mxfp4_blocks(weight[None]))[0].T.bfloat16()

    for weight in [name for name in weights if name.endswith("_proj.weight")]:
        weights[weight] = rounded(weights[weight])
    for weight in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        weights[weight] = torch.stack([rounded(one.T.contiguous()).T for one in weights[weight]])
    assert torch.equal(coded.run(x), fused(feed_forward, weights).run(x))


@pytest.mark.parametrize(
    "g", [DEEPSEEK_V2_LITE, DEEPSEEK_V3, GLM_47_FLASH], ids=lambda g: g.model_type
)
def test_feed_forwards_of_real_sizes_are_supported(g: TargetGeometry) -> None:
    """Compile layers of real sizes: dense layers first, experts of 1408, 1536 and 2048."""
    plain = replace(g, mla=None, head_dim=64, kv_heads=g.q_heads)
    require_cuda_support(plain, None)
    require_cuda_support(replace(plain, dtype="mxfp4"), None)
    with pytest.raises(SpecbuildError, match="--weights-dtype fp8: the model has experts"):
        require_cuda_support(replace(plain, dtype="fp8"), None)
    wide = replace(plain, hidden=8192)
    with pytest.raises(SpecbuildError, match=r"rows of 8192 values to experts, .* up to 7200"):
        require_cuda_support(wide, None)
