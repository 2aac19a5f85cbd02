"""A draft over an explicit path of tokens, in plain torch: the reference for engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class DraftStates:
    """The results of the draft for each row of a path, fp32.

    ``attention`` [T, H] after o_proj, before the residual; ``ffn`` [T, H] after down_proj;
    ``pre_head`` [T, H] after the final norm; ``logits`` [T, Vd]; ``recurrence`` [T, H], the hidden
    state of the next level.
    """

    attention: torch.Tensor
    ffn: torch.Tensor
    pre_head: torch.Tensor
    logits: torch.Tensor
    recurrence: torch.Tensor


class BlockDraft(ABC):
    """A draft whose queries are a block after the target's states, without caches.

    ``block_size`` counts the block's rows; all but the first have ``mask_token``. Rows of a
    ``causal`` block attend only to rows before them. Row ``first_row`` drafts level 1.
    """

    block_size: int
    mask_token: int
    causal: bool
    first_row: int

    @abstractmethod
    def logits(self, aux_hidden: torch.Tensor, root: int) -> torch.Tensor:
        """Return logits [block_size − first_row, V] of the block's levels.

        ``aux_hidden`` [L, aux_layers·Ht] are the states of the tokens before ``root``.
        """


@dataclass(frozen=True)
class LevelStates:
    """The levels of a draft along a path of D tokens from the root, fp32.

    ``state`` [H] is the input of level 1; ``logits`` [D, V] and ``recurrence`` [D, H] are the
    results of each level.
    """

    state: torch.Tensor
    logits: torch.Tensor
    recurrence: torch.Tensor


class CacheDraft(ABC):
    """A recurrent draft over the target's keys and values, without its own."""

    @abstractmethod
    def levels(
        self,
        ids: torch.Tensor,
        root: int,
        path: torch.Tensor,
        state: torch.Tensor | None = None,
    ) -> LevelStates:
        """Return the levels that read ``root`` and then the tokens of ``path`` [D − 1].

        ``ids`` [L] are the committed tokens before the root. ``state`` [H] replaces the target's
        final state of the last of them.
        """


class PathDraft(ABC):
    """A recurrent draft without caches, pages or trees.

    ``mask`` has the token and the aux hidden states [1, aux_layers·Ht] of mask rows, or is None.
    """

    mask: tuple[int, torch.Tensor] | None = None

    @abstractmethod
    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """Fuse the target's aux hidden states [T, aux_layers·Ht] to hidden states [T, H]."""

    @abstractmethod
    def run(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> DraftStates:
        """Run one causal pass: row t has token ``ids`` [T], hidden state ``hidden`` [T, H] and
        position ``positions`` [T].
        """

    def follow(
        self, aux_hidden: torch.Tensor, next_ids: torch.Tensor, path: torch.Tensor
    ) -> DraftStates:
        """Return the states of the last committed row and of each level of a ``path`` [m].

        Committed row t pairs ``aux_hidden`` [L, aux_layers·Ht] with ``next_ids`` [L] at position t.
        Level l has position L − 1 + l and its parent's hidden state. The result has 1 + m rows.
        """
        ids, hidden = next_ids, self.fuse(aux_hidden)
        for token in path:
            parent = self.run(ids, hidden, torch.arange(len(ids))).recurrence[-1:]
            ids, hidden = torch.cat([ids, token[None]]), torch.cat([hidden, parent])
        states = self.run(ids, hidden, torch.arange(len(ids)))
        first = len(next_ids) - 1
        return DraftStates(**{name: value[first:] for name, value in vars(states).items()})


ReferenceDraft: TypeAlias = PathDraft | BlockDraft | CacheDraft
