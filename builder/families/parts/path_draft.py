"""A draft over a literal path of tokens, in plain torch: what engines are held against."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftStates:
    """What the draft computes at each row of a path, fp32.

    ``attention`` [T, H] after o_proj, before the residual; ``ffn`` [T, H] after down_proj;
    ``pre_head`` [T, H] after the final norm; ``logits`` [T, Vd]; ``recurrence`` [T, H] the hidden
    state of the next level.
    """

    attention: torch.Tensor
    ffn: torch.Tensor
    pre_head: torch.Tensor
    logits: torch.Tensor
    recurrence: torch.Tensor


class BlockDraft(ABC):
    """A draft whose queries are a block behind the target's states, without caches.

    ``block_size`` counts the block's rows, ``mask_token`` stands at all but the first. ``causal``
    blocks see what stands before a row alone.
    """

    block_size: int
    mask_token: int
    causal: bool

    @abstractmethod
    def logits(self, aux_hidden: torch.Tensor, root: int) -> torch.Tensor:
        """``aux_hidden`` [L, aux_layers·Ht] of the tokens before ``root`` → logits of the block's
        mask rows [block_size − 1, V]."""


class PathDraft(ABC):
    """A draft that recurs, without caches, pages or trees.

    ``mask`` is the token, and the aux hidden states [1, aux_layers·Ht], of rows that have neither;
    None for a draft without such rows.
    """

    mask: tuple[int, torch.Tensor] | None = None

    @abstractmethod
    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """The target's aux hidden states [T, aux_layers·Ht] → the draft's hidden states [T, H]."""

    @abstractmethod
    def run(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> DraftStates:
        """One causal pass: row t has token ``ids`` [T] and hidden state ``hidden`` [T, H], rotated
        at ``positions`` [T]."""

    def follow(
        self, aux_hidden: torch.Tensor, next_ids: torch.Tensor, path: torch.Tensor
    ) -> DraftStates:
        """The states of the last committed row and of each level down a ``path`` [m] of drafts.

        Row t of the committed part pairs ``aux_hidden`` [L, aux_layers·Ht] with ``next_ids`` [L] at
        position t; level l has position L − 1 + l and the hidden state its parent gave. The result
        has 1 + m rows.
        """
        ids, hidden = next_ids, self.fuse(aux_hidden)
        for token in path:
            parent = self.run(ids, hidden, torch.arange(len(ids))).recurrence[-1:]
            ids, hidden = torch.cat([ids, token[None]]), torch.cat([hidden, parent])
        states = self.run(ids, hidden, torch.arange(len(ids)))
        first = len(next_ids) - 1
        return DraftStates(**{name: value[first:] for name, value in vars(states).items()})
