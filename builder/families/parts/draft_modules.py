"""Modules of drafts that use the target's weights, with the names of the target.

An engine stores such a weight once. DFlash, MTP layers and assistants use these modules.
"""

from __future__ import annotations

import torch
from torch import nn

from specbuild.builder.families.parts.llama import norm_module
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class NormHolder(nn.Module):
    """The target's norm with the name ``norm``."""

    def __init__(self, target: TargetGeometry) -> None:
        super().__init__()
        self.norm = norm_module(target.norm, target.hidden)


class TargetEmbedding(nn.Module):
    """The target's embedding with the target's name."""

    def __init__(self, target: TargetGeometry) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(target.vocab, target.hidden)


class FinalNorm(nn.Module):
    """The role ``draft_fuse``: the target's final norm over the output of its last layer."""

    def __init__(self, _d: DraftGeometry, target: TargetGeometry) -> None:
        super().__init__()
        self.model = NormHolder(target)

    def forward(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """``aux_hidden`` [T, H] → hidden [T, H]."""
        normed: torch.Tensor = self.model.norm(aux_hidden)
        return normed
