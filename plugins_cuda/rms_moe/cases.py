"""Named cases of RmsMoe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw_codes
from specbuild.plugins_cuda.linear.packing import BLOCK, TILE_ROWS, TILE_VALUES
from specbuild.plugins_cuda.linear.storage import BF16, FP8_BLOCK, MXFP4, Q4_K, Q6_K, Q8, Storage
from specbuild.plugins_cuda.rms_moe.packing import (
    TILE_OUTPUTS,
    down_steps,
    gate_up_steps,
    pack_down,
    pack_down_values,
    pack_gate_up,
    pack_gate_up_bias,
    pack_gate_up_values,
)

# Weights of real sizes repeat so many values, a prime number, so that no two experts are equal.
_DRAWN_VALUES = 1_000_003


def _draw(rng: np.random.Generator, *shape: int, fan_in: int) -> np.ndarray:
    """Return normal fp32 values with a standard deviation of ``fan_in ** -0.5``."""
    count = min(prod(shape), _DRAWN_VALUES)
    return np.resize(rng.standard_normal(count, np.float32) * np.float32(fan_in**-0.5), shape)


def draw_experts(
    rng: np.random.Generator, experts: int, tiles: int, steps: int, storage: Storage
) -> np.ndarray:
    """Return packed experts of random quantized values, or of random bf16 values."""
    if storage is BF16:
        return _draw(rng, experts, tiles, steps * TILE_VALUES, fan_in=steps * BLOCK)
    units = draw_codes(rng, experts * tiles * TILE_ROWS, steps * BLOCK, storage)
    return units.reshape(experts, -1, storage.elements)


@dataclass(frozen=True)
class Layer:
    """Rows and geometry of a case; rows from ``live`` on are padding.

    ``popular``: the router's bias assigns most rows to the first ``top_k`` experts. ``twins``:
    experts 2i and 2i + 1 have equal router rows and selection biases, so they tie. ``bf16``:
    experts are stored in bf16; ``units``: the storages of gate/up and down in quantized values.
    ``shared`` experts are in addition to ``experts``; with ``shared_gates``, the router gives the
    logits of their weights. ``router_norm``: the router's input has another norm.
    ``expert_scale``: each expert has a factor.
    """

    rows: int = 4
    live: int | None = None
    hidden: int = 64
    experts: int = 8
    inner: int = 32
    top_k: int = 2
    popular: bool = False
    twins: bool = False
    gate_up_scale: int = 0
    alpha: float = 1.702
    limit: float = 7.0
    gating: str = "softmax_selected"
    rounding: str = "gpt_oss"
    activation: str = "swiglu_clamped"
    bf16: bool = False
    units: tuple[Storage, Storage] | None = None
    logits: str = "rounded"
    choice_bias: bool = False
    groups: int = 1
    groups_chosen: int = 1
    group_score: str = "sum_of_two"
    scaling: float = 1.0
    shared: int = 0
    shared_gates: bool = False
    router_norm: bool = False
    expert_scale: bool = False
    residual: int = 1

    def attributes(self) -> dict[str, Any]:
        """Return the op's attributes."""
        return {
            "eps": 1e-5,
            "top_k": self.top_k,
            "alpha": self.alpha,
            "limit": self.limit,
            "gating": self.gating,
            "rounding": self.rounding,
            "activation": self.activation,
            "logits": self.logits,
            "groups": self.groups,
            "groups_chosen": self.groups_chosen,
            "group_score": self.group_score,
            "scaling": self.scaling,
            "shared": self.shared,
            "shared_gates": int(self.shared_gates),
            "residual": self.residual,
        }

    @property
    def packed(self) -> int:
        """Return the number of experts with weights: routed and shared ones."""
        return self.experts + self.shared

    @property
    def storages(self) -> tuple[Storage, Storage]:
        """Return the storages of gate/up and down."""
        return self.units or ((BF16, BF16) if self.bf16 else (MXFP4, MXFP4))

    def _mxfp4(
        self, rng: np.random.Generator, fan_in: int, fan_out: int, power: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return random quantized values whose dot product with rows of size 1 has size 2^power."""
        shape = (self.packed, fan_out, fan_in // 32)
        blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        middle = 126 - round(np.log2(2.9 * fan_in**0.5)) + power
        scales = rng.integers(middle - 1, middle + 3, shape, dtype=np.uint8)
        return blocks, scales

    def _packed(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the packed weights of gate/up and down."""
        import torch

        if self.units is not None:
            of_gate_up, of_down = self.units
            tiles, steps = self.inner // TILE_OUTPUTS, gate_up_steps(self.hidden)
            units = draw_experts(rng, self.packed, tiles, steps, of_gate_up)
            tiles, steps = self.hidden // TILE_OUTPUTS, down_steps(self.inner)
            return units, draw_experts(rng, self.packed, tiles, steps, of_down)
        if self.bf16:

            def values(fan_in: int, fan_out: int) -> torch.Tensor:
                return torch.from_numpy(_draw(rng, self.packed, fan_in, fan_out, fan_in=fan_in))

            # One after the other: at real sizes each takes gigabytes.
            gate_up = pack_gate_up_values(values(self.hidden, 2 * self.inner))
            return gate_up.numpy(), pack_down_values(values(self.inner, self.hidden)).numpy()
        codes = self._mxfp4(rng, self.hidden, 2 * self.inner, self.gate_up_scale)
        gate_up = pack_gate_up(*map(torch.from_numpy, codes))
        codes = self._mxfp4(rng, self.inner, self.hidden)
        return gate_up.numpy(), pack_down(*map(torch.from_numpy, codes)).numpy()

    def _router(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        weight = rng.standard_normal((self.experts, self.hidden)) * self.hidden**-0.5
        bias = rng.standard_normal(self.experts) * 0.3
        if self.popular:
            bias[: self.top_k] += 8.0
        if self.twins:
            weight[1::2], bias[1::2] = weight[0::2], bias[0::2]
        if self.shared_gates:
            gates = rng.standard_normal((self.shared, self.hidden)) * self.hidden**-0.5
            weight = np.concatenate([weight, gates])
            bias = np.concatenate([bias, np.zeros(self.shared)])
        return weight.astype(np.float32), bias.astype(np.float32)

    def arrays(self, rng: np.random.Generator) -> Arrays:
        """Return the op's inputs."""
        import torch

        x = rng.standard_normal((self.rows, self.hidden)).astype(np.float32)
        live = self.rows if self.live is None else self.live
        x[live:] = np.nan
        norm = (1 + 0.2 * rng.standard_normal(self.hidden)).astype(np.float32)
        router_weight, router_bias = self._router(rng)
        gate_up, down = self._packed(rng)
        b1 = rng.standard_normal((self.packed, 2 * self.inner)).astype(np.float32)
        b2 = rng.standard_normal((self.packed, self.hidden)).astype(np.float32)
        row_start = np.array([0, live // 2, live], np.int32)
        choice_bias = None
        if self.choice_bias:
            choice_bias = (rng.standard_normal(self.experts) * 0.2).astype(np.float32)
            if self.twins:
                choice_bias[1::2] = choice_bias[0::2]
        router_norm = expert_scale = None
        if self.router_norm:
            router_norm = (1 + 0.2 * rng.standard_normal(self.hidden)).astype(np.float32)
        if self.expert_scale:
            expert_scale = (1 + 0.2 * rng.standard_normal(self.experts)).astype(np.float32)
        return (
            x,
            norm,
            router_weight,
            router_bias,
            gate_up,
            pack_gate_up_bias(torch.from_numpy(b1)).numpy(),
            down,
            b2,
            row_start,
            choice_bias,
            router_norm,
            expert_scale,
        )

    def case(self, name: str) -> Case:
        """Return this layer as a case."""
        live = self.rows if self.live is None else self.live
        # The kernels round h to bf16: 2^-9 of terms of size 1 and up.
        return Case(
            name,
            self.arrays,
            self.attributes(),
            compare={"y": np.s_[:live]},
            kernel_atol=0.06 * 2**self.gate_up_scale * max(1.0, self.scaling),
            kernel_rtol=0.02,
        )


_EXAMPLE = Layer(hidden=192, inner=32, experts=8, top_k=4)
_QWEN3 = Layer(hidden=2048, inner=768, experts=128, top_k=8, rounding="llama", activation="swiglu")
QWEN3_BF16 = replace(_QWEN3, bf16=True)
QWEN3_NEXT = replace(QWEN3_BF16, inner=512, experts=512, top_k=10, rounding="offset")
# With a shared expert whose weight is the sigmoid of a logit.
QWEN35_MOE = replace(QWEN3_NEXT, experts=256, top_k=8, shared=1, shared_gates=True)
_GPT_OSS = Layer(hidden=2880, inner=2880, experts=32, top_k=4)

# DeepSeek-V3's: groups by their two best scores, sigmoids with a bias, one shared expert.
DEEPSEEK_V3 = Layer(
    hidden=7168, inner=2048, experts=256, top_k=8, rounding="llama", activation="swiglu",
    gating="sigmoid_norm", logits="fp32", choice_bias=True, groups=8, groups_chosen=4, scaling=2.5,
    shared=1,
)  # fmt: skip
KIMI_K2 = replace(DEEPSEEK_V3, experts=384, groups=1, groups_chosen=1, scaling=2.827)
GLM_FLASH = replace(KIMI_K2, hidden=2048, inner=1536, experts=64, top_k=4, scaling=1.8, bf16=True)
# DeepSeek-V2's: a softmax over all, groups by their best logit, two shared experts.
V2_LITE = replace(
    GLM_FLASH, inner=1408, top_k=6, gating="softmax_topk", choice_bias=False, group_score="max",
    scaling=1.0, shared=2,
)  # fmt: skip
# Gemma 4's: GELU, a router with another norm, factors of experts, no residual.
GEMMA4 = Layer(
    hidden=2816, inner=704, experts=128, top_k=8, activation="geglu_tanh", bf16=True,
    router_norm=True, expert_scale=True, residual=0,
)  # fmt: skip
_SMALL: dict[str, Any] = {"hidden": 64, "inner": 32}
_V3 = replace(DEEPSEEK_V3, **_SMALL, rows=5, experts=16, top_k=3, groups=4, groups_chosen=2)
_V2 = replace(V2_LITE, **_SMALL, rows=5, experts=20, top_k=3, groups=5, groups_chosen=2, bf16=False)

_QUANTIZED = replace(_QWEN3, rows=5, hidden=544, inner=96, experts=6, top_k=3)

CASES: tuple[Case, ...] = (
    Layer().case("plain"),
    Layer(rows=1).case("one row"),
    _EXAMPLE.case("the example's sizes"),
    replace(_EXAMPLE, rows=16, live=11).case("padding rows"),
    replace(_EXAMPLE, rows=4, live=0).case("nothing but padding"),
    replace(_EXAMPLE, rows=1, live=0).case("a row of padding"),
    Layer(rows=13, popular=True, top_k=2).case("more than 8 rows of one expert"),
    Layer(rows=41, popular=True, top_k=3).case("more than 32 rows of one expert"),
    Layer(rows=9, twins=True, top_k=3).case("ties in the router"),
    Layer(rows=1, experts=100, top_k=4, twins=True).case("one row, ties among many experts"),
    Layer(top_k=1).case("top 1"),
    Layer(rows=3, experts=4, top_k=4).case("every expert"),
    Layer(experts=1, top_k=1).case("a single expert"),
    Layer(rows=3, experts=40, top_k=4).case("experts that fill no tile"),
    Layer(gate_up_scale=3).case("values beyond the clamp"),
    Layer(alpha=1.0, limit=2.5).case("another alpha and limit"),
    Layer(rows=5, hidden=480, inner=96).case("K of 15 and of 3 blocks"),
    Layer(rows=5, hidden=512, inner=64).case("K of 16 and of 2 blocks"),
    Layer(rows=5, hidden=544, inner=1056, experts=3).case("K of 17 and of 33 blocks"),
    Layer(rows=1, hidden=704, inner=704).case("K of 22 blocks, one row"),
    replace(_QWEN3, rows=5, hidden=192, inner=96, experts=24).case("LLaMA's norm, plain SwiGLU"),
    replace(QWEN3_BF16, rows=5, hidden=192, inner=96, experts=24).case("bf16"),
    replace(_QUANTIZED, units=(Q4_K, Q6_K)).case("gate and up in q4_k, down in q6_k"),
    replace(_QUANTIZED, units=(FP8_BLOCK, FP8_BLOCK)).case("fp8-block"),
    replace(_QUANTIZED, units=(Q8, BF16)).case("gate and up in q8, down in bf16"),
    replace(QWEN3_BF16, rows=5, hidden=192, inner=96, experts=24, rounding="offset").case(
        "bf16, a norm whose weight is stored less 1"
    ),
    Layer(rows=13, bf16=True, hidden=544, inner=32, popular=True).case("bf16, K of 17 blocks"),
    _V3.case("DeepSeek-V3's choice and a shared expert"),
    replace(_V3, rows=1, bf16=True).case("the same, one row, bf16"),
    replace(_V3, rows=4, live=0).case("the same, nothing but padding"),
    replace(_V3, rows=9, twins=True, groups=2, groups_chosen=1).case("ties within a group"),
    replace(_V3, rows=9, gating="sigmoid", groups=1, groups_chosen=1, top_k=8, scaling=0.25).case(
        "biased sigmoids that are not normalised"
    ),
    replace(_V3, experts=40, groups=1, groups_chosen=1, choice_bias=False, logits="rounded").case(
        "sigmoids of rounded logits, without a bias"
    ),
    _V2.case("DeepSeek-V2's choice and two shared experts"),
    replace(QWEN35_MOE, **_SMALL, rows=5, experts=16, top_k=3, bf16=False).case(
        "a shared expert with a gate"
    ),
    replace(QWEN35_MOE, **_SMALL, rows=1, live=0, experts=16, top_k=3).case(
        "a shared expert with a gate, a row of padding"
    ),
    replace(_V2, rows=9, live=7, shared_gates=True).case("two shared experts with gates"),
    replace(_V3, rows=9, shared_gates=True).case("biased sigmoids, a shared expert with a gate"),
    replace(GEMMA4, **_SMALL, rows=3, experts=32, top_k=4, shared=2, shared_gates=True).case(
        "factors of experts, two shared ones with gates"
    ),
    replace(_V2, rows=1, experts=12, groups=12, groups_chosen=3).case("groups of one expert"),
    replace(_V2, rows=3, experts=63, groups=1, groups_chosen=1).case(
        "shared experts in two sets of 32"
    ),
    replace(_V2, rows=9, gating="softmax_selected", scaling=3.0).case("a scaled softmax in groups"),
    replace(GEMMA4, **_SMALL, rows=5, experts=16, top_k=4).case("Gemma 4's router and GELU"),
    replace(GEMMA4, **_SMALL, rows=1, experts=16, top_k=4).case("the same of Gemma 4, one row"),
    replace(_V3, router_norm=True, expert_scale=True).case(
        "DeepSeek-V3's choice by rows of another norm, with factors"
    ),
    replace(GEMMA4, **_SMALL, rows=3, experts=8, residual=1, bf16=False, top_k=2).case(
        "factors of experts in MXFP4, GELU, a residual"
    ),
)

KERNEL_CASES: tuple[Case, ...] = (
    Layer(rows=70, live=69, experts=100, top_k=3).case("many rows of many experts"),
    Layer(rows=100, hidden=1056, top_k=3).case("activations that do not fit, gate/up"),
    Layer(rows=41, live=38, inner=1056, top_k=4).case("activations that do not fit, down"),
    Layer(rows=70, live=67, hidden=96, inner=64, top_k=4).case("many rows"),
    replace(_QWEN3, rows=40, hidden=192, inner=96, experts=24).case("the same, many rows"),
    replace(QWEN3_BF16, rows=40, hidden=192, inner=96, experts=24).case("bf16, many rows"),
    *(replace(_QWEN3, rows=t).case(f"gpu: qwen3-30b-a3b, {t} rows") for t in (1, 8, 64)),
    *(
        replace(QWEN3_BF16, rows=t).case(f"gpu: qwen3-30b-a3b, bf16, {t} rows")
        for t in (1, 4, 8, 32, 64)
    ),
    replace(_GPT_OSS, rows=1).case("gpu: gpt-oss-20b, 1 row"),
    replace(_GPT_OSS, rows=4).case("gpu: gpt-oss-20b, 4 rows"),
    replace(_GPT_OSS, rows=16, live=15).case("gpu: gpt-oss-20b, 16 rows"),
    replace(_GPT_OSS, rows=64).case("gpu: gpt-oss-20b, 64 rows"),
    replace(_GPT_OSS, rows=256, live=250).case("gpu: gpt-oss-20b, 256 rows"),
    replace(_GPT_OSS, rows=40, popular=True, experts=8).case("gpu: 40 rows of one expert"),
    replace(_GPT_OSS, rows=8, experts=128).case("gpu: gpt-oss-120b, 8 rows"),
    replace(_V3, rows=40, experts=64, groups=8, groups_chosen=4, top_k=8).case(
        "DeepSeek-V3's choice, many rows"
    ),
    replace(KIMI_K2, **_SMALL, rows=35).case("384 experts, many rows"),
    *(replace(QWEN3_NEXT, **_SMALL, rows=t).case(f"top 10 of 512, {t} rows") for t in (1, 5, 35)),
    replace(QWEN3_NEXT, **_SMALL, rows=9, twins=True, bf16=False).case("ties of top 10 of 512"),
    replace(DEEPSEEK_V3, rows=10, inner=32, experts=4, top_k=2, groups=1, groups_chosen=1).case(
        "rows of 7168 values"
    ),
    *(replace(V2_LITE, rows=t).case(f"gpu: deepseek-v2-lite, bf16, {t} rows") for t in (1, 8, 64)),
    *(replace(GLM_FLASH, rows=t).case(f"gpu: glm-4.7-flash, bf16, {t} rows") for t in (1, 8, 64)),
    *(
        replace(GLM_FLASH, bf16=False, rows=t).case(f"gpu: glm-4.7-flash, {t} rows")
        for t in (1, 4, 16, 256)
    ),
    *(
        replace(DEEPSEEK_V3, rows=t, inner=256).case(f"gpu: deepseek-v3, experts of 256, {t} rows")
        for t in (1, 6, 40)
    ),
    replace(DEEPSEEK_V3, rows=8, experts=32).case("gpu: deepseek-v3, 32 experts, 8 rows"),
    replace(DEEPSEEK_V3, rows=64, experts=32).case("gpu: deepseek-v3, 32 experts, 64 rows"),
    replace(KIMI_K2, rows=8, inner=128).case("gpu: kimi-k2, experts of 128, 8 rows"),
    # Experts of Qwen3.5's size, twice as many: 6 GB, so one case beside that of prompts.
    replace(QWEN3_NEXT, rows=8).case("gpu: qwen3-next, bf16, 8 rows"),
    *(replace(QWEN35_MOE, rows=t).case(f"gpu: qwen3.5-35b-a3b, {t} rows") for t in (1, 4, 64)),
    replace(GEMMA4, **_SMALL, rows=35, live=33).case("Gemma 4's router and GELU, many rows"),
    *(replace(GEMMA4, rows=t).case(f"gpu: gemma-4-26b-a4b, {t} rows") for t in (1, 4, 16, 64)),
)
