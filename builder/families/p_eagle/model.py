"""P-EAGLE's modules: those of EAGLE3, and the hidden state of mask rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.eagle3.model import DraftFuse
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class PEagleFuse(DraftFuse):
    """The role ``draft_fuse``: the hidden states of rows, and that of mask rows."""

    def __init__(self, d: PEagleGeometry, target: TargetGeometry) -> None:
        super().__init__(d, target)
        self.draft.mask_state = nn.Parameter(torch.empty(1, d.hidden))

    def forward(self, aux_hidden: torch.Tensor) -> Any:
        """``aux_hidden`` [T, aux_layers·Ht] → hidden [T, H], mask_hidden [1, H]."""
        mask_state: Any = self.draft.mask_state
        return super().forward(aux_hidden), mask_state.clone()
