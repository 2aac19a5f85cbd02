"""MLA-lite's factors as trainable parameters inside a frozen GPT-OSS, with LoRA on its outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from specbuild.builder.checkpoint.latents import DOWN, UP_KEYS, UP_VALUES, latent_name
from specbuild.builder.training.heads.backbone import Backbone, Switch

OUTPUT = "o_proj.weight"
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


class AdaptedOutput(nn.Module):
    """``o_proj`` plus ``x A B``: LoRA (arXiv 2106.09685), B zero at first."""

    def __init__(self, plain: nn.Linear, rank: int, switch: Switch, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(plain.in_features, rank, generator=generator)
        self.plain, self.switch = plain, switch
        self.lora_a = nn.Parameter(drawn * plain.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(rank, plain.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., Q] → [..., H]."""
        y = self.plain(x)
        if not self.switch.on:
            return y
        return y + (x @ self.lora_a.to(x.dtype)) @ self.lora_b.to(x.dtype)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` [H, Q] of the plain projection with the adaptation in it, fp32."""
        joined = self.lora_a.detach().double() @ self.lora_b.detach().double()
        return (weight.double() + joined.T.to(weight.device)).float()


class LatentHeads(nn.Module):
    """The latents of all layers that have one, and LoRA of rank ``lora_rank`` on their outputs."""

    def __init__(
        self, backbone: Backbone, tensors: Mapping[str, torch.Tensor], *, lora_rank: int, seed: int
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.outputs = nn.ModuleDict()
        device = next(backbone.model.parameters()).device
        for index, layer in enumerate(backbone.layers):
            if latent_name(index, DOWN) not in tensors:
                continue
            latents = LayerLatents(*(tensors[latent_name(index, part)] for part in _PARTS))
            self.layers[str(index)] = latents.to(device)
            attention, switch = layer.self_attn, backbone.switch
            attention.k_proj = RebuiltProjection(attention.k_proj, latents, UP_KEYS, switch)
            attention.v_proj = RebuiltProjection(attention.v_proj, latents, UP_VALUES, switch)
            if lora_rank:
                output = AdaptedOutput(attention.o_proj, lora_rank, switch, seed + index)
                self.outputs[str(index)] = attention.o_proj = output.to(device)

    def tensors(
        self, dtype: torch.dtype, outputs: Mapping[int, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the file holds; ``outputs`` are the plain ``o_proj`` weights of adapted layers."""
        stored = {
            latent_name(int(index), part): latents.get_parameter(part).detach()
            for index, latents in self.layers.items()
            for part in _PARTS
        }
        for index, output in self.outputs.items():
            stored[latent_name(int(index), OUTPUT)] = output.merged(outputs[int(index)])
        return {name: tensor.cpu().to(dtype).contiguous() for name, tensor in stored.items()}
