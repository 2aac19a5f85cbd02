"""The predictions of draft models, in plain torch along a path: no pages, trees or masks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from draft_rounds import best_paths, likeliest

from specbuild.builder.families.parts.path_draft import PathDraft
from specbuild.runtime.engine_dir.manifest import DraftShape


class Reference(ABC):
    """A draft model. ``target_ids`` [Vd] are the target ids of its tokens."""

    one_pass: bool

    def __init__(self, target_ids: torch.Tensor) -> None:
        self.target_ids = target_ids

    @abstractmethod
    def follow(
        self, states: torch.Tensor, ids: torch.Tensor, path: tuple[int, ...]
    ) -> torch.Tensor:
        """Return logits [1 + m, Vd] after tokens ``ids`` [L + 1] and along a ``path`` of m drafts.

        ``states`` [L, n·H] are the target's captured states of all tokens but the last.
        """

    @abstractmethod
    def paths(
        self, states: torch.Tensor, ids: torch.Tensor, shape: DraftShape
    ) -> set[tuple[int, ...]]:
        """Return the nodes of the tree that the draft proposes."""


class Recurrent(Reference):
    """A draft that runs once per level. ``run`` is :meth:`Reference.follow`."""

    one_pass = False

    def __init__(
        self,
        run: Callable[[torch.Tensor, torch.Tensor, tuple[int, ...]], torch.Tensor],
        target_ids: torch.Tensor,
    ) -> None:
        super().__init__(target_ids)
        self.run = run

    @torch.no_grad()
    def follow(
        self, states: torch.Tensor, ids: torch.Tensor, path: tuple[int, ...]
    ) -> torch.Tensor:
        """See :class:`Reference`."""
        return self.run(states, ids, path)

    def paths(
        self, states: torch.Tensor, ids: torch.Tensor, shape: DraftShape
    ) -> set[tuple[int, ...]]:
        """See :class:`Reference`."""
        return best_paths(lambda path: self.follow(states, ids, path)[-1], self.target_ids, shape)


class OnePass(Reference):
    """A draft whose logits depend only on depth: ``run(states, ids, D)`` is [D or more, Vd]."""

    one_pass = True

    def __init__(
        self,
        run: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
        target_ids: torch.Tensor,
    ) -> None:
        super().__init__(target_ids)
        self.run = run

    def follow(
        self, states: torch.Tensor, ids: torch.Tensor, path: tuple[int, ...]
    ) -> torch.Tensor:
        """See :class:`Reference`."""
        return self.run(states, ids, 1 + len(path))[: 1 + len(path)]

    def paths(
        self, states: torch.Tensor, ids: torch.Tensor, shape: DraftShape
    ) -> set[tuple[int, ...]]:
        """See :class:`Reference`."""
        return likeliest(self.run(states, ids, shape.draft_depth), self.target_ids, shape)


def recurrent_of(draft: PathDraft, target_ids: torch.Tensor) -> Recurrent:
    """Return a reference from the builder's ``verify``, which shares no code with the graphs."""

    def run(states: torch.Tensor, ids: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
        drafted = torch.tensor(path, dtype=torch.int64)
        return draft.follow(states, ids[1:], drafted).logits

    return Recurrent(run, target_ids)


def fields_of(path: Path) -> dict[str, object]:
    """Return the ``config.json`` of a checkpoint."""
    fields: dict[str, object] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return fields
