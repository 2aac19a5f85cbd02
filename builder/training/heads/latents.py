"""MLA-lite's factors as trainable parameters inside a frozen GPT-OSS, with LoRA on its outputs."""

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
    """One layer's three factors, fp32, under the names of the file.

    Every latent is scaled so that what makes it and what reads it have elements of one size,
    which changes no key and no value: Adam takes steps of one size.
    """

    def __init__(self, down: torch.Tensor, up_keys: torch.Tensor, up_values: torch.Tensor) -> None:
        super().__init__()
        ups = torch.cat([up_keys, up_values], dim=1).float()
        sizes = [part.float().square().mean(axis).sqrt() for part, axis in ((down, 0), (ups, 1))]
        least = torch.finfo(torch.float32).tiny
        scale = (sizes[1].clamp(min=least) / sizes[0].clamp(min=least)).sqrt()
        parts = (down * scale, up_keys / scale[:, None], up_values / scale[:, None])
        for name, part in zip(_PARTS, parts, strict=True):
            self.register_parameter(name, nn.Parameter(part.float()))

    def rebuilt(self, x: torch.Tensor, up: str) -> torch.Tensor:
        """Keys or values of ``x`` [..., H] → [..., kv_width], before their bias."""
        latent = x @ self.get_parameter(DOWN).to(x.dtype)
        return latent @ self.get_parameter(up).to(x.dtype)


class RebuiltProjection(nn.Module):
    """Stands where ``k_proj`` or ``v_proj`` stood."""

    def __init__(self, plain: nn.Linear, latents: LayerLatents, up: str, switch: Switch) -> None:
        super().__init__()
        self.plain, self.latents, self.up, self.switch = plain, latents, up, switch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., H] → [..., kv_width]."""
        if not self.switch.on:
            return self.plain(x)
        return self.latents.rebuilt(x, self.up) + self.plain.bias


class Adaptation(nn.Module):
    """What changes an ``o_proj``: LoRA (arXiv 2106.09685), B zero at first; none at rank 0.

    ``given`` is a weight that the file of latents has in place of the checkpoint's.
    """

    given: torch.Tensor | None

    def __init__(
        self, plain: nn.Linear, given: torch.Tensor | None, *, rank: int, seed: int
    ) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("given", given, persistent=False)
        if rank:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(plain.in_features, rank, generator=generator)
            self.lora_a = nn.Parameter(drawn * plain.in_features**-0.5)
            self.lora_b = nn.Parameter(torch.zeros(rank, plain.out_features))

    def forward(self, x: torch.Tensor, plain: nn.Linear) -> torch.Tensor:
        """``x`` [..., Q] → [..., H]: ``x W + x A B``."""
        y = plain(x) if self.given is None else F.linear(x, self.given.to(x.dtype), plain.bias)
        if not self.rank:
            return y
        return y + (x @ self.lora_a.to(x.dtype)) @ self.lora_b.to(x.dtype)

    def merged(self, plain: torch.Tensor) -> torch.Tensor:
        """The weight [H, Q] that computes the same, fp32; ``plain`` is the checkpoint's."""
        weight = (plain if self.given is None else self.given).cpu().double()
        if self.rank:
            joined = self.lora_a.detach().double() @ self.lora_b.detach().double()
            weight = weight + joined.T.cpu()
        return weight.float()


class AdaptedOutput(nn.Module):
    """Stands where ``o_proj`` stood."""

    def __init__(self, plain: nn.Linear, adaptation: Adaptation, switch: Switch) -> None:
        super().__init__()
        self.plain, self.adaptation, self.switch = plain, adaptation, switch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., Q] → [..., H]."""
        return self.adaptation(x, self.plain) if self.switch.on else self.plain(x)


class LatentHeads(nn.Module):
    """The latents of all layers that have one, and LoRA of rank ``lora_rank`` on their outputs.

    ``plain_outputs`` gives the checkpoint's ``o_proj.weight`` of a layer, which is merged with it.
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
            given = tensors.get(latent_name(index, OUTPUT))
            if lora_rank or given is not None:
                adaptation = Adaptation(
                    attention.o_proj, given, rank=lora_rank, seed=seed + index
                ).to(device)
                self.outputs[str(index)] = adaptation
                attention.o_proj = AdaptedOutput(attention.o_proj, adaptation, switch)

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What the file holds."""
        stored = {
            latent_name(int(index), part): latents.get_parameter(part).detach()
            for index, latents in self.layers.items()
            for part in _PARTS
        }
        for index, adaptation in self.outputs.items():
            plain = self._plain_outputs(int(index))
            stored[latent_name(int(index), OUTPUT)] = cast("Adaptation", adaptation).merged(plain)
        return {name: tensor.cpu().to(dtype).contiguous() for name, tensor in stored.items()}
