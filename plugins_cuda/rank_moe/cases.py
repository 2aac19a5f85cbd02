"""Named cases of RankMoe; a single rank is its own peer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.rank_sum.cases import exchange_arrays
from specbuild.plugins_cuda.rms_moe.cases import QWEN3_BF16, Layer


@dataclass(frozen=True)
class RankLayer:
    """A layer of RmsMoe with the inner width of one rank."""

    layer: Layer
    ranks: int = 2

    def arrays(self, rng: np.random.Generator) -> Arrays:
        """Return the op's inputs."""
        layer = self.layer
        exchange = exchange_arrays(rng, layer.rows, layer.hidden, self.ranks)
        return (*layer.arrays(rng), *exchange)

    def case(self, name: str) -> Case:
        """Return this layer as a case; the error of a sum occurs once per rank."""
        of_one = self.layer.case(name)
        attributes: dict[str, Any] = {**of_one.attributes, "ranks": self.ranks, "exchange": 5}
        return replace(
            of_one,
            make=self.arrays,
            attributes=attributes,
            kernel_atol=of_one.kernel_atol * self.ranks,
        )


_SMALL = Layer(rows=3, hidden=64, inner=32, experts=8, top_k=2)

CASES: tuple[Case, ...] = (
    RankLayer(_SMALL).case("two ranks"),
    RankLayer(replace(_SMALL, rows=9, live=5), ranks=4).case("four ranks, padding rows"),
    RankLayer(replace(_SMALL, rows=1), ranks=8).case("eight ranks, one row"),
    RankLayer(replace(_SMALL, rows=2, live=0)).case("nothing but padding"),
    RankLayer(
        replace(QWEN3_BF16, rows=5, hidden=192, inner=96, experts=24), ranks=2
    ).case("bf16"),
)  # fmt: skip

KERNEL_CASES: tuple[Case, ...] = (
    RankLayer(Layer(rows=1, hidden=2880, inner=1440, experts=8, top_k=4)).case(
        "gpu: half of GPT-OSS"
    ),
    RankLayer(Layer(rows=300, live=290, hidden=64, inner=32, experts=8, top_k=2)).case(
        "gpu: two rounds"
    ),
)
