"""A frozen GPT-OSS, which is the teacher and, with new heads, the student on the same weights."""

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
    """Whether the new heads compute, or the parts that they replace."""

    on: bool = False

    @contextmanager
    def enabled(self, on: bool) -> Iterator[None]:
        """Set ``on`` within the block."""
        previous, self.on = self.on, on
        try:
            yield
        finally:
            self.on = previous


@dataclass(frozen=True)
class States:
    """Hidden states: ``last`` [B, T, H] after the final norm, ``hidden`` after selected layers."""

    last: torch.Tensor
    hidden: dict[int, torch.Tensor]


class Backbone:
    """Runs full sequences.

    With ``checkpointing`` the backward pass recomputes a layer's activations.
    """

    def __init__(self, model: GptOssForCausalLM, *, checkpointing: bool) -> None:
        use_attention(model)
        self.model = model
        self.switch = Switch()
        self.checkpointing = checkpointing

    @property
    def layers(self) -> nn.ModuleList:
        """Return the decoder layers."""
        return self.model.model.layers

    @property
    def head(self) -> nn.Module:
        """Return the module that maps :attr:`States.last` to logits."""
        return self.model.lm_head

    def run(self, ids: torch.Tensor, keep: tuple[int, ...] = ()) -> States:
        """Return the states of ``ids`` [B, T], with or without the new heads as switched."""
        inner = self.model.model
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = inner.embed_tokens(ids)
        tables = inner.rotary_emb(x, positions)
        hidden = {}
        for index, layer in enumerate(self.layers):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(
                    _run_layer, layer, x, positions, tables,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                x = _run_layer(layer, x, positions, tables)
            if index in keep:
                hidden[index] = x
        return States(inner.norm(x), hidden)

    @torch.no_grad()
    def teach(self, ids: torch.Tensor, keep: tuple[int, ...] = ()) -> States:
        """Return the states of ``ids`` [B, T] without the new heads."""
        with self.switch.enabled(False):
            return self.run(ids, keep)


def _run_layer(
    layer: nn.Module,
    x: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    return layer(x, attention_mask=None, position_ids=positions, position_embeddings=tables)
