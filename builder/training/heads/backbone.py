"""A frozen GPT-OSS: it teaches as it is and learns with new heads in place, on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from specbuild.builder.training.heads.attention import use_attention

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM


@dataclass
class Switch:
    """Whether the new heads compute, or what they replace."""

    on: bool = False

    @contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        """``on`` within the block."""
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before


@dataclass(frozen=True)
class States:
    """``last`` [B, T, H] after the final norm, and ``hidden`` [B, T, H] after the layers kept."""

    last: torch.Tensor
    hidden: dict[int, torch.Tensor]


class Backbone:
    """Runs whole sequences. With ``checkpointing`` a layer's activations are computed again in the
    backward pass instead of being kept."""

    def __init__(self, model: GptOssForCausalLM, *, checkpointing: bool) -> None:
        use_attention(model)
        self.model = model
        self.switch = Switch()
        self.checkpointing = checkpointing

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.model.model.layers

    @property
    def head(self) -> nn.Module:
        """Logits of :attr:`States.last`."""
        return self.model.lm_head

    def run(self, ids: torch.Tensor, keep: tuple[int, ...] = ()) -> States:
        """The states of ``ids`` [B, T] as the switch has it."""
        inner = self.model.model
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = inner.embed_tokens(ids)
        tables = inner.rotary_emb(x, positions)
        hidden = {}
        for index, layer in enumerate(self.layers):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(
                    _through, layer, x, positions, tables,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                x = _through(layer, x, positions, tables)
            if index in keep:
                hidden[index] = x
        return States(inner.norm(x), hidden)

    @torch.no_grad()
    def teach(self, ids: torch.Tensor, keep: tuple[int, ...] = ()) -> States:
        """The states of ``ids`` [B, T] without the new heads."""
        with self.switch.turned(False):
            return self.run(ids, keep)


def _through(
    layer: nn.Module,
    x: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    return layer(x, attention_mask=None, position_ids=positions, position_embeddings=tables)
