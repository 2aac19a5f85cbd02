"""Runs a checkpoint on full sequences, with one layer's weights in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD
from specbuild.builder.families.family import StreamedLayer
from specbuild.builder.families.registry import target_family
from specbuild.runtime.engine_dir.geometry import TargetGeometry

_HEAD_ROWS = 256


class StreamedTarget:
    """The tensors of a checkpoint, loaded in fp32 for each use."""

    def __init__(self, geometry: TargetGeometry, tensors: Mapping[str, SourceTensor]) -> None:
        self.geometry = geometry
        self._tensors = tensors

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ``ids`` [N, T] to the hidden states [N, T, H] before layer 0."""
        return self._tensors[EMBEDDING].load()[ids].float()

    def layer(self, index: int) -> StreamedLayer:
        """Load layer ``index``; the caller must drop it before the next."""
        prefix = f"model.layers.{index}."
        weights = {
            name.removeprefix(prefix): tensor.load()
            for name, tensor in self._tensors.items()
            if name.startswith(prefix)
        }
        has_window = self.geometry.layer_types[index] == "sliding_attention"
        window = self.geometry.sliding_window if has_window else 0
        retrofit = target_family(self.geometry.model_type).retrofit
        assert retrofit is not None
        return retrofit(self.geometry, weights, window)

    def projections(self, index: int) -> torch.Tensor:
        """Return ``[W_k | W_v]`` of layer ``index``, fp64 [H, 2·kv_width]."""
        return torch.cat([self.attention(index, f"{part}_proj.weight") for part in "kv"]).T

    def attention(self, index: int, name: str) -> torch.Tensor:
        """Return the tensor ``name`` of a layer's attention, fp64."""
        return self._tensors[f"model.layers.{index}.self_attn.{name}"].load().double()

    @torch.no_grad()
    def losses(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the losses of the text's next tokens: final states [N, T, H] → nats [N, T − 1]."""
        head = self._tensors[HEAD].load().float()
        norm = self._tensors["model.norm.weight"].load().float()
        normed = F.rms_norm(x[:, :-1], norm.shape, norm, self.geometry.norm.eps).flatten(0, 1)
        targets = ids[:, 1:].flatten()
        parts = zip(normed.split(_HEAD_ROWS), targets.split(_HEAD_ROWS), strict=True)
        losses = [F.cross_entropy(rows @ head.T, next_ids, reduction="none")
                 for rows, next_ids in parts]  # fmt: skip
        return torch.cat(losses).view(len(ids), -1)
