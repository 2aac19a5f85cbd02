"""Named cases of Moe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


@dataclass(frozen=True)
class Layer:
    """The rows and geometry of a case."""

    rows: int = 4
    hidden: int = 64
    experts: int = 4
    inner: int = 32
    top_k: int = 2
    mxfp4: bool = False
    biases: bool = True
    tied_router: bool = False
    x_scale: float = 1.0
    gating: str = "softmax_selected"
    alpha: float = 1.702
    limit: float = 7.0
    activation: str = "swiglu_clamped"
    choice_bias: bool = False
    groups: int = 1
    groups_chosen: int = 1
    group_score: str = "sum_of_two"
    scaling: float = 1.0
    expert_scale: bool = False

    def attributes(self) -> dict[str, Any]:
        """Return the op's attributes."""
        return {
            "top_k": self.top_k,
            "gating": self.gating,
            "alpha": self.alpha,
            "limit": self.limit,
            "activation": self.activation,
            "groups": self.groups,
            "groups_chosen": self.groups_chosen,
            "group_score": self.group_score,
            "scaling": self.scaling,
        }

    def _weight(
        self, rng: np.random.Generator, fan_in: int, fan_out: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if self.mxfp4:
            blocks = rng.integers(0, 256, (self.experts, fan_out, fan_in // 32, 16))
            scales = rng.integers(119, 126, (self.experts, fan_out, fan_in // 32))
            return blocks.astype(np.uint8), scales.astype(np.uint8)
        weight = rng.standard_normal((self.experts, fan_in, fan_out)) * fan_in**-0.5
        return weight.astype(np.float32), None

    def arrays(self, rng: np.random.Generator) -> Arrays:
        """Return the op's inputs."""
        x = (rng.standard_normal((self.rows, self.hidden)) * self.x_scale).astype(np.float32)
        logits = rng.standard_normal((self.rows, self.experts)).astype(np.float32)
        if self.tied_router:
            logits = np.round(logits)
        gate_up, gate_up_scales = self._weight(rng, self.hidden, 2 * self.inner)
        down, down_scales = self._weight(rng, self.inner, self.hidden)
        b1 = rng.standard_normal((self.experts, 2 * self.inner)).astype(np.float32)
        b2 = rng.standard_normal((self.experts, self.hidden)).astype(np.float32)
        first, second = (b1, b2) if self.biases else (None, None)
        bias = rng.standard_normal(self.experts).astype(np.float32) if self.choice_bias else None
        if bias is not None and self.tied_router:
            bias = np.round(bias)
        scale = rng.standard_normal(self.experts).astype(np.float32) if self.expert_scale else None
        return x, logits, gate_up, gate_up_scales, first, down, down_scales, second, bias, scale

    def case(self, name: str) -> Case:
        """Return this layer as a case."""
        # With some tens of rows, sums have another order: 1e-5 of the largest term.
        return Case(name, self.arrays, self.attributes(), atol=1e-4, rtol=1e-5)


_MXFP4 = Layer(mxfp4=True)
# DeepSeek-V3's: two of four groups, three experts of these.
_GROUPED = Layer(
    rows=17,
    experts=8,
    top_k=3,
    biases=False,
    gating="sigmoid_norm",
    activation="swiglu",
    choice_bias=True,
    groups=4,
    groups_chosen=2,
    scaling=2.5,
)
# DeepSeek-V2's: groups by their best expert, weights by a softmax over all.
_BY_BEST = replace(
    _GROUPED, gating="softmax_topk", choice_bias=False, group_score="max", scaling=16.0
)

CASES: tuple[Case, ...] = (
    Layer().case("plain"),
    Layer(rows=1).case("one row"),
    Layer(rows=33, experts=8, top_k=4).case("many rows, top 4 of 8"),
    Layer(top_k=1).case("top 1"),
    Layer(top_k=4).case("every expert"),
    Layer(experts=1, top_k=1).case("a single expert"),
    Layer(rows=16, tied_router=True, experts=8).case("ties in the router"),
    Layer(x_scale=20.0).case("values beyond the clamp"),
    Layer(biases=False).case("no biases"),
    Layer(alpha=1.0, limit=2.5).case("another alpha and limit"),
    Layer(hidden=48, inner=20).case("sizes that are no power of two"),
    Layer(gating="softmax_topk").case("softmax over all experts"),
    Layer(gating="sigmoid_norm", tied_router=True).case("normalised sigmoids"),
    Layer(gating="sigmoid", scaling=0.5).case("scaled sigmoids"),
    Layer(activation="swiglu", x_scale=20.0).case("an activation without a clamp"),
    Layer(gating="sigmoid_norm", choice_bias=True).case("chosen by biased scores"),
    _GROUPED.case("groups of experts"),
    replace(_GROUPED, rows=1, gating="sigmoid").case("groups of experts, one row, not normalised"),
    replace(_GROUPED, tied_router=True, groups=2, groups_chosen=1).case("ties within a group"),
    replace(_GROUPED, experts=32, inner=20, top_k=8, groups=8, groups_chosen=4).case(
        "8 of 32 experts in 4 of 8 groups"
    ),
    _BY_BEST.case("groups by their best expert"),
    replace(_BY_BEST, tied_router=True, groups=8, groups_chosen=4).case("groups of one expert"),
    Layer(activation="geglu_tanh", x_scale=20.0).case("GELU"),
    Layer(rows=33, experts=8, top_k=3, activation="geglu_tanh", expert_scale=True).case(
        "GELU, a factor of each expert"
    ),
    Layer(rows=1, biases=False, expert_scale=True, top_k=4).case("factors of all experts"),
    replace(_GROUPED, expert_scale=True).case("groups, a factor of each expert"),
    _MXFP4.case("mxfp4"),
    replace(_MXFP4, rows=1, hidden=96, inner=64).case("mxfp4, one row, several blocks"),
    replace(_MXFP4, rows=9, tied_router=True).case("mxfp4, ties in the router"),
    replace(_MXFP4, biases=False, x_scale=20.0).case("mxfp4, beyond the clamp, no biases"),
)
