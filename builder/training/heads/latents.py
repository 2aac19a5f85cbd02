"""MLA-lite's factors as trainable parameters in a frozen GPT-OSS, with LoRA on its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.checkpoint.latents import (
    DOWN,
    OUTPUT,
    UP_KEYS,
    UP_VALUES,
    latent_name,
)
from specbuild.builder.training.heads.backbone import Backbone, Switch

_PARTS = (DOWN, UP_KEYS, UP_VALUES)


class LayerLatents(nn.Module):
    """One layer's three factors in fp32, with the file's names.

    Every latent is scaled such that the matrices before and after it have elements of one size.
    This changes no key and no value, but Adam's steps have the right size for both.
    """

    def __init__(self, down: torch.Tensor, up_keys: torch.Tensor, up_values: torch.Tensor) -> None:
        super().__init__()
        ups = torch.cat([up_keys, up_values], dim=1).float()
        sizes = [part.float().square().mean(axis).sqrt() for part, axis in ((down, 0), (ups, 1))]
        minimum = torch.finfo(torch.float32).tiny
        scale = (sizes[1].clamp(min=minimum) / sizes[0].clamp(min=minimum)).sqrt()
        parts = (down * scale, up_keys / scale[:, None], up_values / scale[:, None])
        for name, part in zip(_PARTS, parts, strict=True):
            self.register_parameter(name, nn.Parameter(part.float()))

    def rebuild(self, x: torch.Tensor, up: str) -> torch.Tensor:
        """Map ``x`` [..., H] to keys or values [..., kv_width] without their bias."""
        latent = x @ self.get_parameter(DOWN).to(x.dtype)
        return latent @ self.get_parameter(up).to(x.dtype)


class RebuiltProjection(nn.Module):
    """Replaces ``k_proj`` or ``v_proj``."""

    def __init__(self, plain: nn.Linear, latents: LayerLatents, up: str, switch: Switch) -> None:
        super().__init__()
        self.plain, self.latents, self.up, self.switch = plain, latents, up, switch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` [..., H] to [..., kv_width]."""
        if not self.switch.on:
            return self.plain(x)
        return self.latents.rebuild(x, self.up) + self.plain.bias


class Adaptation(nn.Module):
    """The change of an ``o_proj``: LoRA (arXiv 2106.09685) with B zero at first; none at rank 0.

    ``stored`` is the weight of a latent file that replaces the checkpoint's.
    """

    stored: torch.Tensor | None

    def __init__(
        self, plain: nn.Linear, stored: torch.Tensor | None, *, rank: int, seed: int
    ) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("stored", stored, persistent=False)
        if rank:
            generator = torch.Generator().manual_seed(seed)
            values = torch.randn(plain.in_features, rank, generator=generator)
            self.lora_a = nn.Parameter(values * plain.in_features**-0.5)
            self.lora_b = nn.Parameter(torch.zeros(rank, plain.out_features))

    def forward(self, x: torch.Tensor, plain: nn.Linear) -> torch.Tensor:
        """Map ``x`` [..., Q] to [..., H]: ``x W + x A B``."""
        y = plain(x) if self.stored is None else F.linear(x, self.stored.to(x.dtype), plain.bias)
        if not self.rank:
            return y
        return y + (x @ self.lora_a.to(x.dtype)) @ self.lora_b.to(x.dtype)

    def merge(self, plain: torch.Tensor) -> torch.Tensor:
        """Return the equivalent weight [H, Q] in fp32; ``plain`` is the checkpoint's."""
        weight = (plain if self.stored is None else self.stored).cpu().double()
        if self.rank:
            delta = self.lora_a.detach().double() @ self.lora_b.detach().double()
            weight = weight + delta.T.cpu()
        return weight.float()


class AdaptedOutput(nn.Module):
    """Replaces ``o_proj``."""

    def __init__(self, plain: nn.Linear, adaptation: Adaptation, switch: Switch) -> None:
        super().__init__()
        self.plain, self.adaptation, self.switch = plain, adaptation, switch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` [..., Q] to [..., H]."""
        return self.adaptation(x, self.plain) if self.switch.on else self.plain(x)


class LatentHeads(nn.Module):
    """The latents of all layers that have one, and LoRA of rank ``lora_rank`` on their outputs.

    ``plain_outputs`` returns the checkpoint's ``o_proj.weight`` of a layer for the merge.
    """

    def __init__(
        self,
        backbone: Backbone,
        tensors: Mapping[str, torch.Tensor],
        plain_outputs: Callable[[int], torch.Tensor],
        *,
        lora_rank: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.outputs = nn.ModuleDict()
        self._plain_outputs = plain_outputs
        device = next(backbone.model.parameters()).device
        for index, layer in enumerate(backbone.layers):
            if latent_name(index, DOWN) not in tensors:
                continue
            latents = LayerLatents(*(tensors[latent_name(index, part)] for part in _PARTS))
            self.layers[str(index)] = latents.to(device)
            attention: Any = layer.self_attn
            switch = backbone.switch
            attention.k_proj = RebuiltProjection(attention.k_proj, latents, UP_KEYS, switch)
            attention.v_proj = RebuiltProjection(attention.v_proj, latents, UP_VALUES, switch)
            stored = tensors.get(latent_name(index, OUTPUT))
            if lora_rank or stored is not None:
                adaptation = Adaptation(
                    attention.o_proj, stored, rank=lora_rank, seed=seed + index
                ).to(device)
                self.outputs[str(index)] = adaptation
                attention.o_proj = AdaptedOutput(attention.o_proj, adaptation, switch)

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the tensors of the file."""
        tensors = {
            latent_name(int(index), part): latents.get_parameter(part).detach()
            for index, latents in self.layers.items()
            for part in _PARTS
        }
        for index, adaptation in self.outputs.items():
            plain = self._plain_outputs(int(index))
            tensors[latent_name(int(index), OUTPUT)] = cast("Adaptation", adaptation).merge(plain)
        return {name: tensor.cpu().to(dtype).contiguous() for name, tensor in tensors.items()}
