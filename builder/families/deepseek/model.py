"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): MLA, then a dense MLP or routed experts."""

from __future__ import annotations

import torch

from specbuild.builder.families.deepseek.tensors import layer_of
from specbuild.builder.families.parts.llama import LlamaNorm
from specbuild.builder.families.parts.target import Backbone, GraphSizes, TargetModel
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class DeepSeek(TargetModel):
    """A DeepSeek in the role ``target``."""

    def __init__(self, g: TargetGeometry, sizes: GraphSizes) -> None:
        assert g.mla is not None
        layers = [layer_of(g, number).module() for number in range(g.layers)]
        backbone = Backbone(g, layers, LlamaNorm(g.hidden, g.norm.eps))
        table = torch.empty(sizes.positions, g.mla.rope_dim // 2)
        super().__init__(g, sizes.aux_layers, backbone, table)
